"""Observers: everything that looks on while a run works, with the same five calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fedcross.server.run_folder import Lines


class Observer:
    """Watches one run. Each call does nothing unless a subclass defines it.

    `watches` are the events that :meth:`request` wants: ``request`` (before a request leaves), ``request_ended`` (a
    line of the audit trail), ``visit_ended`` (a line of ``visits.jsonl``), ``uploads`` and ``model`` (of a round), and
    ``events``: those of :data:`core.events.EVENTS` on requests. `file` is closed at the end of the run.
    """

    watches: ClassVar[frozenset[str]] = frozenset()
    file: Lines | None = None

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Begin; `run` has the fields of ``run_started``, `lines` the rounds that earlier processes finished."""

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Note an event of a request or of an exchange."""

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Note a finished round: its line of ``metrics.jsonl``."""

    def checkpoint_written(self, number: int, seconds: float) -> None:
        """Note that the checkpoint of round `number` is on disk."""

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """End, and close the file. `result` is that of ``result.json``; None if the run has not finished."""
        if self.file is not None:
            self.file.close()
