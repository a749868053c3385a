"""The events of a run for the structured log (``log.format=json``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcross.core.events import emit
from fedcross.server.observers import Observer


class Events(Observer):
    """Writes one JSON line per event (:data:`core.events.EVENTS`)."""

    watches = frozenset({"events"})

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Write ``run_started``."""
        self._run, self._rounds = run["run"], run["after_round"]
        emit("run_started", **run)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write the event of a request."""
        emit(event, **fields)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Write ``round_finished`` with the line of metrics."""
        self._rounds = entry["round"]
        emit("round_finished", **entry)

    def checkpoint_written(self, number: int, seconds: float) -> None:
        """Write ``checkpoint_written``."""
        emit("checkpoint_written", round=number, seconds=round(seconds, 4))

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Write ``run_finished`` or ``run_stopped``; the command writes ``run_failed``."""
        if error is not None:
            return
        if result is None:
            emit("run_stopped", run=self._run, rounds=self._rounds)
            return
        scores = {name: result[name] for name in ("rounds", "final_accuracy", "best_accuracy")}
        audit = (result.get("audit") or {}).get("sha256")
        emit("run_finished", run=self._run, **scores, audit_sha256=audit)
