"""Progress display of a run: a live bar in a terminal, one line per round elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from fedcross.core.events import structured

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

#: Columns of the bar, of the time that is left, and of the shortest title, which the others line up behind.
BAR, TIME, TITLE = 24, 8, 16


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
    """A live progress bar: round, accuracy, pool similarity, time left.

    A narrow terminal has less of it: :func:`fitting` says what. Round and time are always whole.
    """

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich
        from rich.table import Column

        def column(width: int | None = None) -> Column:
            return Column(no_wrap=True, min_width=width)

        self._title = TextColumn("[bold]{task.description}", table_column=column())
        self._line = BarColumn(bar_width=BAR)
        self._count: Callable[[int], ProgressColumn] = lambda width: MofNCompleteColumn(table_column=column(width))
        self._state = TextColumn("{task.fields[state]}", table_column=column())
        self._left = TimeRemainingColumn(table_column=column(TIME))
        self._bar = Rich()
        self._task: Any = None
        self._named, self._total = "", 0
        self._entry: Mapping[str, Any] | None = None

    def start(self, title: str, done: int, total: int) -> None:
        """Show the bar."""
        self._named, self._total = title, total
        self._task = self._bar.add_task(title, total=total, completed=done, state="")
        self._fit(done)
        self._bar.start()

    def round(self, entry: Mapping[str, Any]) -> None:
        """Advance by one round."""
        if entry["test_accuracy"] is not None:
            self._entry = entry
        self._fit(entry["round"])

    def stop(self) -> None:
        """Leave the last state of the bar on the screen."""
        self._bar.stop()

    def _fit(self, done: int) -> None:
        """Show round `done`, with what the terminal has room for now."""
        title, line, state = fitting(self._bar.console.width, self._named, self._total, self._entry)
        count = self._count(2 * len(str(self._total)) + 1)
        self._bar.columns = (self._title, *([self._line] if line else []), count, self._state, self._left)
        self._bar.update(self._task, completed=done, description=title, state=state)


def fitting(width: int, title: str, total: int, entry: Mapping[str, Any] | None) -> tuple[str, bool, str]:
    """Return the title, whether there is a bar, and the text of the last evaluated round that fit into `width` columns.

    The pool similarity goes first, then the bar, then the end of the title.
    """
    fixed = 2 * len(str(total)) + 1 + TIME + 3  # with the spaces between the columns
    title = f"{title:<{TITLE}}"
    for line, all_of_it in ((True, True), (True, False), (False, False)):
        state = "" if entry is None else describe(entry, pool=all_of_it)
        room = width - fixed - len(state) - (BAR + 1 if line else 0)
        if len(title) <= room:
            return title, line, state
    return title[: max(room - 1, 1)].rstrip() + "…", False, state


def describe(entry: Mapping[str, Any], *, pool: bool = True) -> str:
    """Return accuracy, pool similarity (if `pool`) and the number of lost clients as a short text."""
    words = [f"accuracy {100 * entry['test_accuracy']:.2f} %"]
    if pool and entry.get("pool_similarity_mean") is not None:
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
