"""Schedules: settings whose value changes from round to round, as configuration entries that can be nested.

    alpha: 0.99
    alpha: {schedule: linear, start: 0.5, end: 0.99, rounds: 100}
    alpha:
      schedule: staged
      stages: [{until: 50, value: 0.5}, {value: {schedule: cosine, start: 0.5, end: 0.99, rounds: 50}}]
    mode: {schedule: staged, stages: [{until: 50, value: propellers}, {value: cross}]}

A plain number or word, for every round, stays as it is. Other schedules have ``at(round_number)``, the value in this
round, and ``values()``, between which all others lie. Rounds are counted from 1, as in Flower, and inside a stage from
1 again. A method with a pool reads its settings by :meth:`strategies.parts.pooled.PooledParams.at`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from fedcross.core.settings import Settings


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
        value, number = self.stages[len(ended)].value, round_number - max(ended, default=0)
        return value if isinstance(value, float | str) else value.at(number)

    def values(self) -> list[Any]:
        """Return the values of all stages."""
        return [value for stage in self.stages for value in values_of(stage.value)]


def values_of(schedule: Schedule) -> list[Any]:
    """Return the values between which all others of a schedule lie; a plain value alone."""
    return [schedule] if isinstance(schedule, float | str) else schedule.values()


def _plain(value: Any) -> Any:
    """Read ``{schedule: constant, value: V}`` as V, and ``{stages: ...}`` as a staged schedule."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"schedule", "value"} and value["schedule"] == "constant":
        return value["value"]
    return {"schedule": "staged", **value} if "stages" in value else value


def _kind(value: Any) -> str:
    return "plain" if isinstance(value, int | float | str) and not isinstance(value, bool) else "changing"


Schedule: TypeAlias = Annotated[
    Annotated[float | str, Tag("plain")] | Annotated[Ramp | Staged, Field(discriminator="schedule"), Tag("changing")],
    Discriminator(_kind),
    BeforeValidator(_plain),
]
"""A number or a word for every round."""

Stage.model_rebuild()


def checked(allowed: Callable[[Any], bool], text: str) -> AfterValidator:
    """Return a check that a schedule has only allowed values; `text` says which these are."""

    def check(schedule: Schedule) -> Schedule:
        if wrong := [value for value in values_of(schedule) if not allowed(value)]:
            raise ValueError(f"must be {text}" + ("" if isinstance(schedule, float | str) else f", not {wrong[0]}"))
        return schedule

    return AfterValidator(check)


def within(low: float, high: float) -> AfterValidator:
    """Return a check that a schedule has numbers from `low` to `high`."""
    return checked(lambda value: not isinstance(value, str) and low <= value <= high, f"from {low:g} to {high:g}")


Share: TypeAlias = Annotated[Schedule, within(0.0, 1.0)]
"""A number from 0 to 1 for every round, such as alpha."""
