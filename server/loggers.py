"""Scalars of a run for live viewers. One class per ``conf/logger`` name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Scalars(Protocol):
    """Receives every line of ``metrics.jsonl``."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record one round."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class Silent:
    """Records nothing."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path, purge_from: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if purge_from > 1:
            from tensorboard.compat.proto.event_pb2 import SessionLog

            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=purge_from, session_log=start))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record every number of one round under its own name."""
        import time

        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in entry.items()
            if isinstance(value, int | float) and name != "round"
        ]
        event = self._event(step=entry["round"], wall_time=time.time(), summary=self._summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def open_logger(name: str, folder: Path, first_round: int) -> Scalars:
    """Return the logger called `name`, writing into `folder`, starting at `first_round`."""
    if name == "tensorboard":
        return TensorBoard(folder, first_round)
    return Silent()
