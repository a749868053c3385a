"""Progress of a run: a live bar in a terminal, a line per evaluated round elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from fedcross.core.events import structured
from fedcross.server.observers import Observer

#: Columns of a terminal from which on there is a bar beside the numbers.
WIDE = 100


class Lines(Observer):
    """One plain line per evaluated round, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._title, self._total = "", 0

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Remember what runs."""
        self._title, self._total = f"{run['method']} {run['task']}", run["rounds"]

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Print the round if it was evaluated."""
        if entry["test_accuracy"] is not None:
            text = f"{self._title}  round {entry['round']}/{self._total}  {describe(entry)}"
            print(text, file=self._stream or sys.stdout, flush=True)


class Bar(Observer):
    """A live bar: round, accuracy, pool similarity, time left. A narrow terminal cuts the state."""

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        title, total = f"{run['method']} {run['task']}", run["rounds"]
        columns = [TextColumn("[bold]{task.description}"), MofNCompleteColumn(), TextColumn("{task.fields[state]}")]
        self._bar = Progress(*columns, TimeRemainingColumn())
        width = self._bar.console.width
        if width >= WIDE:
            self._bar.columns = (columns[0], BarColumn(bar_width=24), *self._bar.columns[1:])
        self._room = max(width - len(title) - 2 * len(str(total)) - 12 - 25 * (width >= WIDE), 0)
        self._task = self._bar.add_task(title[: width // 2], total=total, completed=run["after_round"], state="")
        self._bar.start()

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Advance by one round."""
        if entry["test_accuracy"] is not None:
            self._bar.update(self._task, state=describe(entry)[: self._room])
        self._bar.update(self._task, completed=entry["round"])

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
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


def pick(stream: TextIO | None = None) -> Observer:
    """Return a bar in a terminal, lines elsewhere, nothing if the log is structured."""
    if structured():
        return Observer()
    return Bar() if (stream or sys.stdout).isatty() else Lines(stream)
