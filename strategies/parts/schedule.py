"""Schedules: settings whose value changes from round to round, as configuration entries that can be nested.

    alpha: 0.99
    alpha: {schedule: linear, start: 0.5, end: 0.99, rounds: 100}
    alpha:
      schedule: staged
      stages: [{until: 50, value: 0.5}, {value: {schedule: cosine, start: 0.5, end: 0.99, rounds: 50}}]
    mixing: {schedule: staged, stages: [{until: 50, value: propellers}, {value: cross}]}

Rounds are counted from 1, as in Flower, and inside a stage from 1 again. All schedules have ``at(round_number)``, the
value in this round; ``values()``, between which all others lie; and ``settled()``, the round from which on the value
stays the same. A settings class must write its default as an object: ``alpha: Share = Constant(value=0.99)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator
from pydantic import SerializerFunctionWrapHandler as Handler

from fedcross.core.settings import Settings

T = TypeVar("T")


class Constant(Settings):
    """The same value in every round; it is written to a configuration as a plain number."""

    schedule: Literal["constant"] = "constant"
    value: float

    @model_serializer
    def _number(self) -> float:
        return self.value

    def at(self, round_number: int) -> float:
        """Return the value."""
        return self.value

    def values(self) -> list[float]:
        """Return the value alone."""
        return [self.value]

    def settled(self) -> int:
        """Return 1."""
        return 1


class Linear(Settings):
    """``start + t (end - start)`` with ``t = (round - 1)/(rounds - 1)``, and `end` from round `rounds` on.

    FedCross's dynamic alpha goes from 0.5 to 0.99 "for the first 100 FL rounds" (ICDE paper, acceleration of FedCross).
    The paper does not name the curve; linear is this project's choice.
    """

    schedule: Literal["linear"] = "linear"
    start: float
    end: float
    rounds: int = Field(ge=1)

    def at(self, round_number: int) -> float:
        """Return the value in this round."""
        share = 1.0 if round_number >= self.rounds else self._curve(max(0, round_number - 1) / (self.rounds - 1))
        return (1 - share) * self.start + share * self.end

    def _curve(self, t: float) -> float:
        return t

    def values(self) -> list[float]:
        """Return both ends."""
        return [self.start, self.end]

    def settled(self) -> int:
        """Return the last round of the way."""
        return self.rounds


class Cosine(Linear):
    """As :class:`Linear`, with ``(1 - cos(pi t))/2`` in place of t: slow at both ends."""

    schedule: Literal["cosine"] = "cosine"  # type: ignore[assignment]

    def _curve(self, t: float) -> float:
        return (1 - math.cos(math.pi * t)) / 2


class Stage(Settings, Generic[T]):
    """A schedule, or a word, up to and with round `until`; the last stage needs no end and never ends."""

    until: int | None = None
    value: T


class _Stages(Settings, Generic[T]):
    """One stage after the other."""

    schedule: Literal["staged"] = "staged"
    stages: tuple[Stage[T], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        ends = [stage.until or 0 for stage in self.stages if stage is not self.stages[-1] or stage.until is not None]
        if any(b <= a for a, b in zip([0, *ends], ends)):
            raise ValueError(f"every stage but the last needs its last round, `until`; these must ascend, not {ends}")
        return self

    def at(self, round_number: int) -> Any:
        """Return the value in this round."""
        over = [0, *(stage.until or 0 for stage in self.stages[:-1] if (stage.until or 0) < round_number)]
        value: Any = self.stages[len(over) - 1].value
        return value if isinstance(value, str) else value.at(round_number - over[-1])

    def values(self) -> list[Any]:
        """Return the values of all stages."""
        values: list[Any] = [stage.value for stage in self.stages]
        return [one for value in values for one in ([value] if isinstance(value, str) else value.values())]

    def settled(self) -> int:
        """Return the round from which on the last stage's value stays the same."""
        last: Any = self.stages[-1].value
        before = self.stages[-2].until or 0 if len(self.stages) > 1 else 0
        return before + (1 if isinstance(last, str) else last.settled())


class Staged(_Stages["Schedule"]):
    """One schedule after the other."""


class Choice(_Stages[T], Generic[T]):
    """One of several words for every round: ``Choice[Literal["cross", "propellers"]]``; a plain word is one stage."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"stages": [{"value": value}]} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _plainest(self, written: Handler) -> Any:
        """Write a single choice as a plain word."""
        first = self.stages[0]
        return first.value if len(self.stages) == 1 and first.until is None else written(self)

    @classmethod
    def always(cls, value: T) -> Self:
        """Return the same choice for every round."""
        return cls(stages=(Stage[T](value=value),))


def _plain(value: Any) -> Any:
    """Read a plain number as a constant schedule."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"schedule": "constant", "value": value} if number else value


Schedule: TypeAlias = Annotated[
    Constant | Linear | Cosine | Staged, Field(discriminator="schedule"), BeforeValidator(_plain)
]
"""A number for every round."""

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
