"""A process that is ready to become a run's ServerApp: Flower and torch are imported, nothing of any run is loaded.

It waits for one run, becomes Flower's own ``flwr-serverapp`` for it, and ends with it: no second run ever meets what
the first one has left. It imports nothing of fedcross, because a run brings its own. Flower's function installs and
loads the bundle, as in a process that Flower starts.

On the line to the SuperExec: it says ``ready``; it hears ``token`` with ``arguments`` and answers ``taken``; on ``go``
it begins. If the line ends before that, it ends, and has asked for nothing in the run's name. A run may come while it
still imports: then it leaves the rest to the run, which so is never later than in a new process.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from . import whole
from .program import beside

#: Flower's command whose work this process does.
PROGRAM = "flwr-serverapp"
#: The slowest of what a run of fedcross imports besides its own code; one that is missing is the run's affair.
IMPORTS = ("torch", "hydra", "pydantic", "safetensors.torch", "scipy.optimize", "flwr.serverapp")
MODULE, FUNCTION = "flwr.superlink.cli.flwr_serverapp", "flwr_serverapp"


def prepare(line: socket.socket) -> Callable[[], None]:
    """Import what a run needs, until there is one; return the function that is Flower's command."""
    start: Callable[[], None] = getattr(import_module(MODULE), FUNCTION)
    for name in IMPORTS:
        if select.select([line], [], [], 0)[0]:
            break
        with suppress(ImportError):
            import_module(name)
    return start


def await_run(line: socket.socket) -> dict[str, Any] | None:
    """Say that this process is ready; return what belongs to the run that it gets, None if there will be none."""

    def tell(said: str) -> None:
        line.sendall(f"{json.dumps({said: True})}\n".encode())

    heard: Iterator[str] = line.makefile("r", encoding="utf-8")
    try:
        tell("ready")
        given: dict[str, Any] = json.loads(next(heard))
        tell("taken")
        return given if "go" in json.loads(next(heard)) else None
    except (OSError, StopIteration, KeyboardInterrupt):
        return None


def become(start: Callable[[], None], given: dict[str, Any]) -> None:
    """Be Flower's command for the run; its token is in no process list, because only this process's memory has it."""
    if given["silent"]:  # Flower shows nothing of a ServerApp; its lines go to the SuperLink
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    call_itself(PROGRAM)
    whole.attach()
    sys.argv = [beside(PROGRAM), *given["arguments"], "--token", given["token"]]
    start()


def call_itself(name: str) -> None:
    """Take a name for ``ps`` and ``pgrep`` (Linux); the command line stays that of a process that waits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # 15: PR_SET_NAME


def main(arguments: list[str]) -> int:
    """Wait for a run on the socket with descriptor ``arguments[0]`` and become its ServerApp."""
    line = socket.socket(fileno=int(arguments[0]))
    try:
        start = prepare(line)
    except KeyboardInterrupt:
        return 0
    given = await_run(line)
    line.close()
    if given is None:
        os._exit(0)  # no library's clean-up: nothing has happened here
    become(start, given)
    return 0
