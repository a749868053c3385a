"""The supervisor: runs a SuperNode, asks it for tasks, and hands them to a worker that stays between messages.

It holds neither torch nor data. The worker is another process:

- started when a task comes and none is there; one bundle per process, a new process for another bundle;
- ended after half an hour without a task, which gives its memory back;
- reported when it dies in a task: the server gets an error at once, and the next task gets a new worker, after a pause
  that doubles while workers keep dying;
- killed when it does not answer a message while that lives, or does not take one within half an hour (it hangs while it
  loads a run, say); the next one starts as after any other death;
- left to Flower for an app that does not say that it may stay loaded (:mod:`worker`): after its first message, each
  further one gets a ``flwr-clientapp`` of its own.

If the SuperNode ends, the supervisor ends with its exit code; if the supervisor is told to end, it ends the SuperNode.
With a version of Flower that :mod:`flower_runtime` was not compared with, Flower's own ``flower-superexec`` takes the
place of all this.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from logging import ERROR, INFO, WARNING
from pathlib import Path
from types import FrameType

from flwr.common.logger import log

from . import flower_runtime as runtime
from . import link
from .crew import IDLE_S, Actions, Crew
from .node import PROGRAM
from .partner import GRACE_S
from .program import beside
from .program import command as own

IDLE = "FEDCROSS_EXECUTOR_IDLE"
#: Seconds until the next question for a task: after the SuperNode has written a line to its log, which it does when a
#: message comes, then :data:`GROWTH` times as long each time, at most the last number.
FIRST_PAUSE_S, GROWTH, QUIET_PAUSE_S = 0.02, 3.0, 2.0
#: After so many questions in a row without an answer, the log says why.
AWAY_LOOKS = 15
#: Seconds for what a SuperNode that has ended still wrote.
LAST_WORDS_S = 1.0
#: Exit code if the SuperNode refuses the secret.
REFUSED = 4


class Node:
    """The SuperNode's process. What it writes to its log is passed on, and tells when something has happened.

    Parameters
    ----------
    command : sequence of str
        Starts it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        self._wrote = threading.Event()
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        if (pipe := self._process.stderr) is None:
            return
        while found := os.read(pipe.fileno(), 1 << 16):
            self._wrote.set()
            with suppress(OSError):  # nobody reads the log: the SuperNode must go on all the same
                sys.stderr.buffer.write(found)
                sys.stderr.buffer.flush()

    def wait(self, seconds: float) -> bool:
        """Wait until it writes to its log, at most `seconds`; return whether it has, since the last call."""
        wrote = self._wrote.wait(seconds)
        self._wrote.clear()
        return wrote

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def signal(self, number: int, frame: FrameType | None = None) -> None:
        """Tell it to end (a signal handler of this process)."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Tell it to end if it runs, and return its exit code as a shell does (128 and more for signals)."""
        if not self.ended():
            self._process.terminate()
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(LAST_WORDS_S)  # they say why it ended
        return code if code >= 0 else 128 - code


class Watch:
    """Says in the log that the SuperLink does not answer the device, less and less often, and that it answers again.

    It ends nothing: the SuperNode goes on asking, and a device that is cut off keeps its worker and its replies.

    Parameters
    ----------
    answered : callable
        Returns when the SuperLink answered last, in seconds of `clock`; None if it never did.
    clock : callable
        Tells the time in seconds.
    """

    def __init__(self, answered: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._answered, self._clock = answered, clock
        self._began, self._limit = clock(), link.CUT_OFF_S

    def look(self) -> None:
        """Look once."""
        now, answered = self._clock(), self._answered()
        silent = now - (self._began if answered is None else answered)
        if silent > self._limit:
            log(WARNING, "fedcross: no answer of the SuperLink for %.0f s; this device is cut off", silent)
            self._limit = 2 * silent
        elif silent <= link.CUT_OFF_S < self._limit:
            log(INFO, "fedcross: the SuperLink answers again")
            self._limit = link.CUT_OFF_S


def serve(node: Node, door: runtime.Door, crew: Crew, look: Callable[[], None] = lambda: None) -> int:
    """Have all tasks of `node` done until it ends, calling `look` before each question; return the exit code."""
    pause, away = FIRST_PAUSE_S, 0
    try:
        while not node.ended():
            look()
            try:
                task = door.acquire() if crew.ready else None
            except runtime.AwayError as error:  # it starts, or ends
                away += 1
                if away % AWAY_LOOKS == 0:
                    log(WARNING, "fedcross: the SuperNode hands out no tasks: %s", error)
                node.wait(QUIET_PAUSE_S)
                continue
            away = 0
            if task is not None:
                crew.do(task, node.ended)
                pause = FIRST_PAUSE_S
                continue
            crew.rest()
            pause = FIRST_PAUSE_S if node.wait(pause) else min(GROWTH * pause, QUIET_PAUSE_S)
    except runtime.RefusedError as error:
        cure = "Start both with one file; if another device of this machine has this port, choose another --port."
        log(ERROR, "fedcross: the SuperNode refuses this executor's secret (%s). %s", error, cure)
        node.end()
        return REFUSED
    finally:
        crew.dismiss()
    return node.end()


def main(arguments: list[str]) -> int:
    """Run a SuperNode and what does its work; return the SuperNode's exit code."""
    asked = _parser().parse_args(arguments)
    address = f"127.0.0.1:{asked.port}"
    try:
        secret = asked.secret.read_bytes()
    except OSError as error:
        raise SystemExit(f"{asked.secret}: this secret cannot be read ({error.strerror}).") from error
    node = Node(node_command(asked.command))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, node.signal)
    if runtime.known():
        crew = Crew(Actions.at(address), float(os.environ.get(IDLE, IDLE_S)))
        file = link.place(asked.port)
        look = Watch(lambda: link.last(file)).look if file is not None else lambda: None
        return serve(node, runtime.Door(address, secret), crew, look)
    log(WARNING, "fedcross: this Flower is not %s.x; it starts a process per message", " or ".join(runtime.CHECKED))
    options = ["--insecure", "--runtime-api-address", address, "--superexec-auth-secret-file", str(asked.secret)]
    executor = subprocess.Popen([beside("flower-superexec"), *options, "--parent-pid", str(os.getpid())])
    while not node.ended() and executor.poll() is None:
        time.sleep(1.0)
    executor.terminate()
    return node.end()


def node_command(asked: Sequence[str]) -> list[str]:
    """Return what starts the SuperNode: the command that was `asked` for, with :mod:`node`'s pauses where they fit."""
    program, *options = asked
    if Path(program).name == PROGRAM and runtime.known():
        return [*own("node"), *options]
    return [beside(program), *options]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedcross executor", description="Run a SuperNode and do its work.")
    parser.add_argument("--port", type=int, required=True, help="the SuperNode's port on this machine")
    parser.add_argument("--secret", type=Path, required=True, help="file of the secret that the SuperNode has too")
    parser.add_argument("command", nargs="+", help="the command that starts the SuperNode, after --")
    return parser


def _end_with_parent() -> None:
    """Have this new process told to end when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
