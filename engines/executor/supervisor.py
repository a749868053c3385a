"""The supervisor: runs a SuperNode, asks it for tasks, and hands them to a worker that stays between messages.

It holds neither torch nor data. The worker is another process:

- started when a task comes and none is there; one bundle per process, a new process for another bundle;
- ended after :data:`IDLE_S` seconds without a task, which gives its memory back;
- reported when it dies in a task: the server gets an error at once, and the next task gets a new worker, after a pause
  that doubles while workers keep dying;
- left to Flower for an app that does not say that it may stay loaded (:mod:`worker`): after its first message, each
  further one gets a ``flwr-clientapp`` of its own.

If the SuperNode ends, the supervisor ends with its exit code; if the supervisor is told to end, it ends the SuperNode.
With a version of Flower that :mod:`flower_runtime` was not compared with, Flower's own ``flower-superexec`` takes the
place of all this.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.common.logger import log

from . import flower_runtime as runtime
from .program import command as part_command

IDLE = "FEDCROSS_EXECUTOR_IDLE"
#: Seconds without a task after which a worker ends.
IDLE_S = 1800.0
#: Seconds until the next question for a task: after the SuperNode has written a line to its log, which it does when a
#: message comes, then :data:`GROWTH` times as long each time, at most the last number.
FIRST_PAUSE_S, GROWTH, QUIET_PAUSE_S = 0.02, 3.0, 2.0
#: Seconds between two signs of life for a task in work; Flower's limit is 60.
ALIVE_S = 15.0
#: Pause before a worker is started after a second one has died: the first one, and the longest one.
PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
GRACE_S = 10.0
#: After so many questions in a row without an answer, the log says why.
AWAY_LOOKS = 15
#: Exit code if the SuperNode refuses the secret.
REFUSED = 4


class Worker:
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
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [*part_command("worker"), str(other.fileno()), address],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which ends it
            )
        self._line, self._rest = own, b""

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def hand(self, token: str) -> None:
        """Hand over a task; a worker that has died shows in :meth:`hear`."""
        try:
            self._line.sendall(f"{json.dumps({'token': token})}\n".encode())
        except OSError:
            return

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """Return what the worker says next, or None if it says nothing within `seconds`.

        Raises
        ------
        EOFError
            If it has ended.
        """
        while b"\n" not in self._rest:
            if not select.select([self._line], [], [], seconds)[0]:
                return None
            try:
                found = self._line.recv(1 << 16)
            except OSError as error:
                raise EOFError from error
            if not found:
                raise EOFError
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def end(self) -> int:
        """Close the line, on which the process ends, and return its exit code; negative numbers are signals."""
        self._line.close()
        try:
            return self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


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
        until, sign = float("inf"), self.actions.clock() + ALIVE_S
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
                    worker.kill()
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
        command = [_beside("flwr-clientapp"), "--runtime-api-address", address, "--insecure"]
        command += ["--token-file", str(file), "--parent-pid", str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            yield process


class Node:
    """The SuperNode's process. What it writes to its log is passed on, and tells when something has happened.

    Parameters
    ----------
    command : sequence of str
        Starts it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [_beside(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        self._wrote = threading.Event()
        threading.Thread(target=self._pass_on, daemon=True).start()

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
        return code if code >= 0 else 128 - code


def serve(node: Node, door: runtime.Door, crew: Crew) -> int:
    """Have all tasks of `node` done until it ends; return the exit code."""
    pause, away = FIRST_PAUSE_S, 0
    try:
        while not node.ended():
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
        log(ERROR, "fedcross: the SuperNode refuses this executor's secret (%s). Start both with one file.", error)
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
    node = Node(asked.command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, node.signal)
    if runtime.known():
        crew = Crew(Actions.at(address), float(os.environ.get(IDLE, IDLE_S)))
        return serve(node, runtime.Door(address, secret), crew)
    log(WARNING, "fedcross: this Flower is not %s.x; it starts a process per message", " or ".join(runtime.CHECKED))
    options = ["--insecure", "--runtime-api-address", address, "--superexec-auth-secret-file", str(asked.secret)]
    beside = subprocess.Popen([_beside("flower-superexec"), *options, "--parent-pid", str(os.getpid())])
    while not node.ended() and beside.poll() is None:
        time.sleep(1.0)
    beside.terminate()
    return node.end()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedcross executor", description="Run a SuperNode and do its work.")
    parser.add_argument("--port", type=int, required=True, help="the SuperNode's port on this machine")
    parser.add_argument("--secret", type=Path, required=True, help="file of the secret that the SuperNode has too")
    parser.add_argument("command", nargs="+", help="the command that starts the SuperNode, after --")
    return parser


def _beside(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name}: not found beside {sys.executable} nor on PATH. Install flwr.")
    return found


def _end_with_parent() -> None:
    """Have this new process told to end when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
