"""Schedules: settings whose value changes from round to round, as configuration entries that can be nested.

A plain value is a constant schedule::

    alpha: 0.99
    alpha: {schedule: linear, start: 0.5, end: 0.99, rounds: 100}
    alpha:
      schedule: staged
      stages:
        - {until: 50, value: 0.5}
        - {value: {schedule: cosine, start: 0.5, end: 0.99, rounds: 50}}
    mixing: {schedule: staged, stages: [{until: 50, value: propellers}, {value: cross}]}

Rounds are counted from 1, as in Flower. Inside a stage they are counted from 1 again. A settings class must write its
default as an object, because pydantic does not parse defaults: ``alpha: Share = Constant(value=0.99)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fedcross.core.settings import Settings

T = TypeVar("T")


def _plain(value: Any) -> Any:
    """Read a plain number as a constant schedule."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"schedule": "constant", "value": value}
    return value


class Constant(Settings):
    """The same value in every round; it is written to a configuration as a plain number."""

    schedule: Literal["constant"] = "constant"
    value: float

    @model_serializer
    def _number(self) -> float:
        return self.value

    def at(self, round_number: int) -> float:
        """Return the value in this round."""
        return self.value

    def values(self) -> list[float]:
        """Return values between which all others lie."""
        return [self.value]

    def settled(self) -> int:
        """Return the round from which on the value stays the same."""
        return 1


class _Ramp(Settings):
    """From `start` in round 1 to `end` in round `rounds`, and `end` from then on."""

    start: float
    end: float
    rounds: int = Field(ge=1)

    def _share(self, round_number: int) -> float:
        """Return the position on the ramp, 0 to 1; a ramp of one round is at its end."""
        if round_number >= self.rounds:
            return 1.0
        return max(0, round_number - 1) / (self.rounds - 1)

    def values(self) -> list[float]:
        """Return values between which all others lie."""
        return [self.start, self.end]

    def settled(self) -> int:
        """Return the round from which on the value stays the same."""
        return self.rounds


class Linear(_Ramp):
    """``start + t (end - start)`` with ``t = (round - 1)/(rounds - 1)``.

    FedCross's dynamic alpha goes from 0.5 to 0.99 "for the first 100 FL rounds" (ICDE paper, acceleration of FedCross).
    The paper does not name the curve; linear is this project's choice.
    """

    schedule: Literal["linear"] = "linear"

    def at(self, round_number: int) -> float:
        """Return the value in this round."""
        share = self._share(round_number)
        return (1 - share) * self.start + share * self.end


class Cosine(_Ramp):
    """As :class:`Linear`, with ``(1 - cos(pi t))/2`` in place of t: slow at both ends."""

    schedule: Literal["cosine"] = "cosine"

    def at(self, round_number: int) -> float:
        """Return the value in this round."""
        share = (1 - math.cos(math.pi * self._share(round_number))) / 2
        return (1 - share) * self.start + share * self.end


class _HasUntil(Protocol):
    @property
    def until(self) -> int | None: ...


S = TypeVar("S", bound=_HasUntil)


def _ascending(stages: Sequence[S]) -> Sequence[S]:
    """Check that the ends of the stages ascend; the last stage needs no end and never ends."""
    ends = [stage.until for stage in stages]
    if any(end is None for end in ends[:-1]):
        raise ValueError(f"every stage but the last needs the round it lasts `until`, not {ends}")
    known = [end for end in ends if end is not None]
    if any(b <= a for a, b in zip([0, *known], known)):
        raise ValueError(f"the stages' `until` must be ascending rounds from 1, not {known}")
    return stages


def _stage(stages: Sequence[S], round_number: int) -> tuple[S, int]:
    """Return the stage of this round and the round's number inside it."""
    before = 0
    for stage in stages[:-1]:
        if stage.until is not None and round_number <= stage.until:
            return stage, round_number - before
        before = stage.until or 0
    return stages[-1], round_number - before


def _before_last(stages: Sequence[S]) -> int:
    """Return how many rounds are over when the last stage begins."""
    return (stages[-2].until or 0) if len(stages) > 1 else 0


class Stage(Settings):
    """A schedule up to and with round `until`."""

    until: int | None = None
    value: Schedule


class Staged(Settings):
    """One schedule after the other."""

    schedule: Literal["staged"] = "staged"
    stages: tuple[Stage, ...] = Field(min_length=1)

    _check = field_validator("stages")(_ascending)

    def at(self, round_number: int) -> float:
        """Return the value in this round."""
        stage, inside = _stage(self.stages, round_number)
        return stage.value.at(inside)

    def values(self) -> list[float]:
        """Return values between which all others lie."""
        return [value for stage in self.stages for value in stage.value.values()]

    def settled(self) -> int:
        """Return the round from which on the value stays the same."""
        return _before_last(self.stages) + self.stages[-1].value.settled()


class ChoiceStage(Settings, Generic[T]):
    """A choice up to and with round `until`."""

    until: int | None = None
    value: T


class Choice(Settings, Generic[T]):
    """One of several words for every round: ``Choice[Literal["cross", "propellers"]]``; a plain word is one stage."""

    schedule: Literal["staged"] = "staged"
    stages: tuple[ChoiceStage[T], ...] = Field(min_length=1)

    _check = field_validator("stages")(_ascending)

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"stages": [{"value": value}]}
        if isinstance(value, Mapping) and value.get("schedule") == "constant":
            return {"stages": [{key: entry for key, entry in value.items() if key != "schedule"}]}
        return value

    @model_serializer(mode="wrap")
    def _plainest(self, written: SerializerFunctionWrapHandler) -> Any:
        """Write a single choice as a plain word."""
        first = self.stages[0]
        return first.value if len(self.stages) == 1 and first.until is None else written(self)

    @classmethod
    def always(cls, value: T) -> Self:
        """Return the same choice for every round."""
        return cls(stages=(ChoiceStage(value=value),))

    def at(self, round_number: int) -> T:
        """Return the choice in this round."""
        return _stage(self.stages, round_number)[0].value

    def values(self) -> list[T]:
        """Return every choice."""
        return [stage.value for stage in self.stages]

    def settled(self) -> int:
        """Return the round from which on the choice stays the same."""
        return _before_last(self.stages) + 1


Schedule: TypeAlias = Annotated[
    Constant | Linear | Cosine | Staged, Field(discriminator="schedule"), BeforeValidator(_plain)
]
"""A number for every round."""

Stage.model_rebuild()
Staged.model_rebuild()


def within(low: float, high: float) -> Callable[[Schedule], Schedule]:
    """Return a check that a schedule never leaves ``low..high``, for pydantic's AfterValidator."""

    def check(schedule: Schedule) -> Schedule:
        outside = [value for value in schedule.values() if not low <= value <= high]
        if outside:
            seen = "" if isinstance(schedule, Constant) else f" in every round, not {outside[0]:g}"
            raise ValueError(f"must be from {low:g} to {high:g}{seen}")
        return schedule

    return check


Share: TypeAlias = Annotated[Schedule, AfterValidator(within(0.0, 1.0))]
"""A number from 0 to 1 for every round, such as alpha."""


def whole_numbers(schedule: Schedule) -> Schedule:
    """Check that a schedule has whole numbers, 1 or more, as its ends."""
    wrong = [value for value in schedule.values() if value < 1 or value != int(value)]
    if wrong:
        raise ValueError(f"must be a whole number of models, 1 or more, not {wrong[0]:g}")
    return schedule
