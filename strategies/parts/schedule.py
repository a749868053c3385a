"""Schedules: settings whose value changes from round to round, as configuration entries that can be nested.

    alpha: 0.99
    alpha: {schedule: linear, start: 0.5, end: 0.99, rounds: 100}
    alpha:
      schedule: staged
      stages: [{until: 50, value: 0.5}, {value: {schedule: cosine, start: 0.5, end: 0.99, rounds: 50}}]
    mode: {schedule: staged, stages: [{until: 50, value: propellers}, {value: cross}]}

Rounds are counted from 1, as in Flower, and inside a stage from 1 again. All schedules have ``at(round_number)``, the
value in this round, and ``values()``, between which all others lie. A settings class must write its default as an
object: ``alpha: Share = Constant(value=0.99)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator

from fedcross.core.settings import Settings


class Constant(Settings):
    """The same number or word in every round; it is written to a configuration as that alone."""

    schedule: Literal["constant"] = "constant"
    value: float | str

    @model_serializer
    def _alone(self) -> float | str:
        return self.value

    def at(self, round_number: int) -> Any:
        """Return the value."""
        return self.value

    def values(self) -> list[Any]:
        """Return the value alone."""
        return [self.value]


class Ramp(Settings):
    """``start + t (end - start)`` with ``t = (round - 1)/(rounds - 1)``, and `end` from round `rounds` on.

    ``cosine`` has ``(1 - cos(pi t))/2`` in place of t: slow at both ends. FedCross's dynamic alpha goes from 0.5 to
    0.99 "for the first 100 FL rounds" (ICDE paper, acceleration of FedCross). The paper does not name the curve; linear
    is this project's choice.
    """

    schedule: Literal["linear", "cosine"]
    start: float
    end: float
    rounds: int = Field(ge=1)

    def at(self, round_number: int) -> Any:
        """Return the value in this round."""
        t = 1.0 if round_number >= self.rounds else max(0, round_number - 1) / (self.rounds - 1)
        share = (1 - math.cos(math.pi * t)) / 2 if self.schedule == "cosine" else t
        return (1 - share) * self.start + share * self.end

    def values(self) -> list[Any]:
        """Return both ends."""
        return [self.start, self.end]


class Stage(Settings):
    """A schedule up to and with round `until`; the last stage needs no end and never ends."""

    until: int | None = None
    value: Schedule


class Staged(Settings):
    """One schedule after the other."""

    schedule: Literal["staged"] = "staged"
    stages: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        ends = [stage.until or 0 for stage in self.stages if stage is not self.stages[-1] or stage.until is not None]
        if any(b <= a for a, b in zip([0, *ends], ends)):
            raise ValueError(f"every stage but the last needs its last round, `until`; these must ascend, not {ends}")
        return self

    def at(self, round_number: int) -> Any:
        """Return the value in this round."""
        ended = [stage.until or 0 for stage in self.stages[:-1] if (stage.until or 0) < round_number]
        return self.stages[len(ended)].value.at(round_number - max(ended, default=0))

    def values(self) -> list[Any]:
        """Return the values of all stages."""
        return [value for stage in self.stages for value in stage.value.values()]


def _mapping(value: Any) -> Any:
    """Read a plain number or word as a constant schedule, and ``{stages: ...}`` as a staged one."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return {"schedule": "constant", "value": value}
    return {"schedule": "staged", **value} if isinstance(value, dict) and "stages" in value else value


Schedule: TypeAlias = Annotated[Constant | Ramp | Staged, Field(discriminator="schedule"), BeforeValidator(_mapping)]
"""A number or a word for every round."""

Stage.model_rebuild()


def checked(allowed: Callable[[Any], bool], text: str) -> AfterValidator:
    """Return a check that a schedule has only allowed values; `text` says which these are."""

    def check(schedule: Schedule) -> Schedule:
        if wrong := [value for value in schedule.values() if not allowed(value)]:
            raise ValueError(f"must be {text}" + ("" if isinstance(schedule, Constant) else f", not {wrong[0]}"))
        return schedule

    return AfterValidator(check)


def within(low: float, high: float) -> AfterValidator:
    """Return a check that a schedule has numbers from `low` to `high`."""
    return checked(lambda value: not isinstance(value, str) and low <= value <= high, f"from {low:g} to {high:g}")


Share: TypeAlias = Annotated[Schedule, within(0.0, 1.0)]
"""A number from 0 to 1 for every round, such as alpha."""
