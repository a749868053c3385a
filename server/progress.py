"""Progress display of a run: a live bar in a terminal, one line per round elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from fedcross.core.events import structured


class Progress(Protocol):
    """Shows every finished round."""

    def start(self, title: str, done: int, total: int) -> None:
        """Begin after round `done` of `total`."""
        ...

    def round(self, entry: Mapping[str, Any]) -> None:
        """Show one line of ``metrics.jsonl``."""
        ...

    def stop(self) -> None:
        """Restore the terminal."""
        ...


class Silent:
    """Shows nothing: the log has an event for every round."""

    def start(self, title: str, done: int, total: int) -> None:
        """Do nothing."""

    def round(self, entry: Mapping[str, Any]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class Lines:
    """One plain line per evaluated round, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._title, self._total = "", 0

    def start(self, title: str, done: int, total: int) -> None:
        """Remember what runs."""
        self._title, self._total = title, total

    def round(self, entry: Mapping[str, Any]) -> None:
        """Print the round if it was evaluated."""
        if entry["test_accuracy"] is not None:
            text = f"{self._title}  round {entry['round']}/{self._total}  {describe(entry)}"
            print(text, file=self._stream or sys.stdout, flush=True)

    def stop(self) -> None:
        """Do nothing: there is no terminal to restore."""


class Bar:
    """A live progress bar: round, accuracy, pool similarity, time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        self._bar = Rich(
            TextColumn("[bold]{task.description:<16}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self._task: Any = None
        self._state = ""

    def start(self, title: str, done: int, total: int) -> None:
        """Show the bar."""
        self._task = self._bar.add_task(title, total=total, completed=done, state="")
        self._bar.start()

    def round(self, entry: Mapping[str, Any]) -> None:
        """Advance by one round."""
        if entry["test_accuracy"] is not None:
            self._state = describe(entry)
        self._bar.update(self._task, completed=entry["round"], state=self._state)

    def stop(self) -> None:
        """Leave the last state of the bar on the screen."""
        self._bar.stop()


def describe(entry: Mapping[str, Any]) -> str:
    """Return accuracy, pool similarity and the number of lost clients as a short text."""
    words = [f"accuracy {100 * entry['test_accuracy']:.2f} %"]
    if entry.get("pool_similarity_mean") is not None:
        words.append(f"pool similarity {entry['pool_similarity_mean']:.3f}")
    if entry["dropped"]:
        words.append(f"{entry['dropped']} of {entry['clients']} clients lost")
    return "  ".join(words)


def pick(stream: TextIO | None = None) -> Progress:
    """Return a bar in a terminal, lines elsewhere, nothing if the log is structured."""
    target = stream or sys.stdout
    if structured():
        return Silent()
    return Bar() if target.isatty() else Lines(stream)
