"""Warnings about a run that goes wrong: replies without finite numbers, widths that no device trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from fedcross.server.observers import Observer

#: Reasons for which replies are rejected where the learning rate is too large.
DIVERGED = ("non_finite", "bad_metrics")
#: Rounds in succession without an accepted reply for a width, before a warning.
IDLE_ROUNDS = 10


class Advice(Observer):
    """Logs each warning once; `rates` names the settings to lower if the training diverges."""

    def __init__(self, rates: str) -> None:
        self._rates, self._diverged = rates, False
        self._idle: dict[str, int] = {}  # width -> rounds in succession without an accepted reply

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Count what earlier processes saw."""
        for entry in lines:
            self._count(entry)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Warn about the round."""
        rejected = {reason: entry["rejected"].get(reason, 0) for reason in DIVERGED}
        count, number = sum(rejected.values()), entry["round"]
        if not self._diverged and 2 * count > entry["clients"]:
            self._diverged = True
            why = ", ".join(f"{reason} {times}" for reason, times in rejected.items() if times)
            log(
                WARNING,
                f"fedcross: round {number}: {count} of {entry['clients']} replies rejected, {why}. The training "
                f"probably diverges: lower {self._rates}, or set train.clip. If it went well before, a device's reply "
                "may have ruined the model.",
            )
        self._count(entry)
        for width in [width for width, rounds in self._idle.items() if rounds == IDLE_ROUNDS]:
            log(
                WARNING,
                f"fedcross: round {number}: no reply for models of width {width} was accepted in {IDLE_ROUNDS} rounds, "
                "so they are not trained. Look at `rejected` and at the devices of this width, or remove it from "
                "method.widths.",
            )

    def _count(self, entry: Mapping[str, Any]) -> None:
        for width, replies in entry.get("width_replies", {}).items():
            self._idle[width] = 0 if replies else self._idle.get(width, 0) + 1
