"""Looks after the processes of runs that a SuperExec starts: says in its log how one ended, unless it ended well.

Flower starts such a process and forgets it: of one that was killed, its own log could not say so any more.
"""

from __future__ import annotations

import functools
import signal
import subprocess
from collections.abc import Mapping, Sequence
from logging import WARNING
from types import SimpleNamespace
from typing import Any

from flwr.common.logger import log

#: Starts a process; a test puts another one in its place.
start: Any = subprocess.Popen


class Ended:
    """The processes of runs that have not ended."""

    def __init__(self) -> None:
        self._processes: dict[Any, str] = {}

    def watch(self, process: Any, what: str) -> None:
        """Look after `process`, which has the ``pid`` and ``poll`` of a :class:`subprocess.Popen` and is `what`."""
        self._processes[process] = what

    def look(self) -> None:
        """Say which have ended, and how, since the last look."""
        for process, what in list(self._processes.items()):
            if (code := process.poll()) is not None:
                del self._processes[process]
                if code:
                    log(WARNING, "fedcross: the process of %s (pid %d) %s", what, process.pid, how(code))


def how(code: int) -> str:
    """Return in words how a process with this exit code ended; negative numbers are signals."""
    if code > 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "?"
    return f"was ended by signal {-code} ({name})" + (": too little memory, or by hand" if name == "SIGKILL" else "")


def attach(ended: Ended, instead: Mapping[str, Sequence[str]]) -> None:
    """Look after the processes that the SuperExec of this process is going to start.

    Parameters
    ----------
    ended : Ended
        Gets each of them.
    instead : mapping of str to sequence of str
        Flower's command -> what is started in its place, with its arguments.
    """
    from flwr.supercore.superexec.executor import subprocess_executor as module

    flower: Any = module.SubprocessExecutor
    launch, reconcile = flower.launch, flower.reconcile

    @functools.wraps(launch)
    def launched(executor: Any, spec: Any) -> Any:
        def watched(command: list[str], **settings: Any) -> Any:
            program, *arguments = command
            process = start([*instead.get(program, [program]), *arguments], **settings)
            ended.watch(process, f"task {spec.task_id}")
            return process

        # Flower keeps no process that it starts. One thread launches them.
        module.subprocess = SimpleNamespace(Popen=watched, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined,assignment]
        try:
            return launch(executor, spec)
        finally:
            module.subprocess = subprocess  # type: ignore[attr-defined]

    @functools.wraps(reconcile)
    def looked(executor: Any) -> None:
        ended.look()
        reconcile(executor)

    flower.launch, flower.reconcile = launched, looked
