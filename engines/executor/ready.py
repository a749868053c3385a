"""Keeps one process ready for the next run of a SuperExec (:mod:`serverapp`); else a run begins with 4 s of imports.

The SuperExec itself stays Flower's (:mod:`superexec`). A run is left to Flower's own way, a new ``flwr-serverapp``, if
it is another app's than fedcross's, if no process is ready, or if the one that is does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.common.logger import log

from .crew import IDLE_S
from .partner import Partner

#: Variable: ``on``, ``off``, or ``once`` for a SuperExec of a single run.
SWITCH = "FEDCROSS_READY"
WAYS = ("on", "off", "once")
#: Seconds in which a process has to answer to a run: one whose imports are done, and one that is in the middle of them.
ANSWER_S, PATIENCE_S = 5.0, 20.0
#: Seconds after a run's start before the next process is prepared, which would make that start slower.
SETTLE_S = 20.0
#: After so many processes in a row that ended by themselves, no other one is started.
MOST_DEATHS = 3


def switch(text: str | None) -> str:
    """Return which of the :data:`WAYS` the environment's `text` names.

    Raises
    ------
    ValueError
        If it names none.
    """
    if text and text not in WAYS:
        raise ValueError(f"{SWITCH}={text}: give one of {', '.join(WAYS)}.")
    return text or WAYS[0]


@dataclass
class Ready:
    """The process that is ready, from run to run.

    Parameters
    ----------
    start : callable
        Starts a process.
    room : callable
        Tells whether one more run may start; while it may not, its memory is not taken either.
    idle_s : float
        Seconds without a run after which the process ends; Flower starts the next run, and then there is one again.
    once : bool
        Whether there will be one run only.
    given : callable
        Gets each process to which a run was given.
    """

    start: Callable[[], Partner]
    room: Callable[[], bool] = lambda: True
    idle_s: float = IDLE_S
    once: bool = False
    given: Callable[[Partner], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    waiting: Partner | None = None
    #: Whether the waiting process has said that its imports are done.
    imported: bool = False
    #: Processes that ended by themselves, one after another.
    deaths: int = 0
    #: When the last run was started, and when a process may be prepared; infinite: not before another run.
    last: float = field(init=False)
    not_before: float = 0.0

    def __post_init__(self) -> None:
        self.last = self.clock()

    @property
    def held(self) -> int:
        """How many processes there are that have no run: 0 or 1."""
        return int(self.waiting is not None)

    def look(self) -> None:
        """See to the process between two questions for a run: start it, notice its end, end it if it is not needed."""
        now = self.clock()
        if self.waiting is None:
            if now >= self.not_before and self.room():
                self.waiting, self.imported = self.start(), False
        elif not self.room():
            self.dismiss()  # a run of another app has the memory
        elif now - self.last >= self.idle_s:
            log(INFO, "fedcross: no run for %.0f s; the process that was ready ends", self.idle_s)
            self.dismiss()
            self.not_before = float("inf")
        else:
            self._hear(0)

    def take(self, given: dict[str, Any]) -> bool:
        """Give a run to the process; return False if Flower has to start one."""
        self._note_run()
        if (process := self.waiting) is None:
            return False
        process.tell(given)
        if not self._answers():
            if self.waiting is not None:
                process.kill()  # it has not begun, and never will: another one may
                self._died("did not answer")
            return False
        process.tell({"go": True})
        process.release()
        self.given(process)
        self.waiting, self.imported, self.deaths = None, False, 0
        return True

    def leave(self) -> None:
        """Note that Flower starts the run of another app."""
        self._note_run()
        if self.once:
            self.dismiss()

    def dismiss(self) -> None:
        """End the process, if there is one."""
        if self.waiting is not None:
            self.waiting.kill()  # in the middle of an import it would not notice that its line is closed
            self.waiting.end()
            self.waiting, self.imported = None, False

    def _note_run(self) -> None:
        self.last = self.clock()
        over = self.once or self.deaths >= MOST_DEATHS
        self.not_before = float("inf") if over else self.last + SETTLE_S

    def _answers(self) -> bool:
        """Return whether the process takes the run that it was told of."""
        said = self._hear(ANSWER_S if self.imported else PATIENCE_S)
        if said is not None and "taken" not in said:
            said = self._hear(ANSWER_S)
        return said is not None and "taken" in said

    def _hear(self, seconds: float) -> dict[str, Any] | None:
        """Return what the process says within `seconds`, None if nothing; note its first word, and its end."""
        if self.waiting is None:
            return None
        try:
            said = self.waiting.hear(seconds)
        except EOFError:
            self._died("ended")
            return None
        self.imported = self.imported or said is not None
        return said

    def _died(self, how: str) -> None:
        process, self.waiting, self.imported = self.waiting, None, False
        code = None if process is None else process.end()
        self.deaths += 1
        ever = "Flower starts the processes of runs from now on" if self.deaths >= MOST_DEATHS else "Flower starts one"
        log(WARNING, "fedcross: the process that was ready for a run %s (exit code %s). %s.", how, code, ever)
        later = float("inf") if self.deaths >= MOST_DEATHS else self.clock() + SETTLE_S
        self.not_before = max(self.not_before, later)
