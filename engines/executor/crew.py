"""The worker of one SuperNode, from task to task: started, watched, reported when it dies, ended when idle."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from . import flower_runtime as runtime
from .partner import Partner
from .program import beside

#: Seconds without a task after which a worker ends. One that does not take a task that it was handed gets as long, and
#: at least this long: it starts, or loads what a run needs, which may take minutes.
IDLE_S = 1800.0
#: Seconds between two signs of life for a task in work; Flower's limit is 60.
ALIVE_S = 15.0
#: Pause before a worker is started after a second one has died: the first one, and the longest one.
PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0


class Worker(Partner):
    """A worker process and the line to it.

    Parameters
    ----------
    address : str
        The SuperNode's Runtime API.
    bundle : str
        SHA-256 of the bundle of all messages that it will get.
    """

    def __init__(self, address: str, bundle: str) -> None:
        self.bundle = bundle
        super().__init__("worker", address)

    def hand(self, token: str) -> None:
        """Hand over a task; a worker that has died shows in :meth:`hear`."""
        self.tell({"token": token})


@dataclass
class Actions:
    """What the supervisor does outside of its process; tests replace it."""

    address: str
    start: Callable[[str], Worker]
    report: Callable[[str, str, str], bool]
    alive: Callable[[str], None]
    flower: Callable[[str], AbstractContextManager[subprocess.Popen[bytes]]]
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def at(cls, address: str) -> Actions:
        """Return those for the SuperNode at `address`."""
        return cls(
            address,
            start=lambda bundle: Worker(address, bundle),
            report=lambda token, text, why: runtime.report_death(address, token, text, why),
            alive=lambda token: runtime.still_alive(address, token),
            flower=lambda token: flower_process(address, token),
        )


@dataclass
class Crew:
    """The worker of one SuperNode, from task to task.

    Parameters
    ----------
    actions : Actions
        What it can do.
    idle_s : float
        Seconds without a task after which the worker ends.
    """

    actions: Actions
    idle_s: float = IDLE_S
    worker: Worker | None = None
    #: Bundles whose app does not say that it may stay loaded.
    foreign: set[str] = field(default_factory=set)
    #: Workers that died one after another, and the time before which no other one is started.
    deaths: int = 0
    not_before: float = 0.0
    last: float = 0.0

    @property
    def patience(self) -> float:
        """Seconds in which a worker takes a task that it was handed; else it is killed."""
        return max(self.idle_s, IDLE_S)

    @property
    def ready(self) -> bool:
        """Whether a task can be taken now."""
        return self.worker is not None or self.actions.clock() >= self.not_before

    def rest(self) -> None:
        """Look after the worker between tasks: end one that has been idle for long, forget one that has ended."""
        if self.worker is None:
            return
        if self.actions.clock() - self.last >= self.idle_s:
            log(INFO, "fedcross: no message for %.0f s; the worker ends", self.idle_s)
            self.dismiss()
            return
        try:
            self.worker.hear(0)
        except EOFError:
            log(WARNING, "fedcross: the worker ended between two messages (exit code %s)", self.dismiss())

    def dismiss(self) -> int | None:
        """End the worker, if there is one, and return its exit code."""
        worker, self.worker = self.worker, None
        return None if worker is None else worker.end()

    def do(self, task: runtime.Task, gone: Callable[[], bool]) -> None:
        """See to it that the message of `task` is answered. `gone` tells whether the SuperNode has ended."""
        if task.bundle in self.foreign:
            self.dismiss()
            self._leave_to_flower(task, gone)
        else:
            if self.worker is not None and self.worker.bundle != task.bundle:
                self.dismiss()
            if self.worker is None:
                self.worker = self.actions.start(task.bundle)
            self._watch(self.worker, task, gone)
        self.last = self.actions.clock()

    def _watch(self, worker: Worker, task: runtime.Task, gone: Callable[[], bool]) -> None:
        worker.hand(task.token)
        head: str | None = ""
        until, sign = self.actions.clock() + self.patience, self.actions.clock() + ALIVE_S
        while True:
            now = self.actions.clock()
            if now >= sign:
                self.actions.alive(task.token)
                sign = now + ALIVE_S
            try:
                said = worker.hear(min(1.0, max(until - now, 0.0)))
            except EOFError:
                return self._died(task, head, self.dismiss())
            if said is None:
                if gone():
                    return None
                if self.actions.clock() >= until:
                    what = "answer" if head else "take"
                    log(WARNING, "fedcross: the worker did not %s its message in time; it is killed", what)
                    worker.kill()
                    until = float("inf")
            elif "taken" in said:  # its objects may come over a slow line; the SuperNode ends the task if they do not
                until = float("inf")
            elif "pulled" in said:
                head, until = str(said["pulled"]), self.actions.clock() + float(said["seconds"])
            elif "pushed" in said:
                head, until = None, float("inf")
            else:
                return self._done(task, said)

    def _done(self, task: runtime.Task, said: dict[str, Any]) -> None:
        self.deaths = 0
        if not said["stays"]:
            log(INFO, "fedcross: this app is not made to stay loaded; Flower starts a process for each of its messages")
            self.foreign.add(task.bundle)
        if not said["done"]:
            self.dismiss()

    def _died(self, task: runtime.Task, head: str | None, code: int | None) -> None:
        """Note that the worker has ended in `task`; `head` is None if it had replied."""
        if code == runtime.CLAIM_LOST:
            return
        self.deaths += 1
        pause = min(PAUSE_S * 2 ** (self.deaths - 2), LONGEST_PAUSE_S) if self.deaths > 1 else 0.0
        self.not_before = self.actions.clock() + pause
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if head is None:
            log(ERROR, "fedcross: the worker process ended after its reply (%s)", how)
            return
        reason = f"The worker process ended while it worked on this message ({how})."
        told = self.actions.report(task.token, head, reason)
        log(ERROR, "fedcross: %s %s", reason, "The server knows." if told else "The SuperNode takes no reply for it.")

    def _leave_to_flower(self, task: runtime.Task, gone: Callable[[], bool]) -> None:
        sign = self.actions.clock() + ALIVE_S
        with self.actions.flower(task.token) as process:
            while process.poll() is None:
                if gone():
                    process.kill()
                if self.actions.clock() >= sign:
                    self.actions.alive(task.token)
                    sign = self.actions.clock() + ALIVE_S
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)


@contextmanager
def flower_process(address: str, token: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start Flower's own process for one message; its token is in a file of this user, not on the command line."""
    with tempfile.TemporaryDirectory(prefix="fedcross-task-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "token"
        file.touch(mode=0o600)
        file.write_text(token, encoding="ascii")
        command = [beside("flwr-clientapp"), "--runtime-api-address", address, "--insecure"]
        command += ["--token-file", str(file), "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            yield process
