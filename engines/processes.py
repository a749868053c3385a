"""Starts the processes of a federation and ends all of them together.

Flower's programs and Ray start further programs, some in their own sessions; killing the known process groups would
leave those running. Therefore every process inherits a random mark in its environment, and ending the family means
ending every process with that mark. If this process dies without cleaning up (``kill -9``, out of memory), a watchdog
process does the same.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from fedcross.core.errors import FederationError
from fedcross.core.files import open_own
from fedcross.core.paths import import_root

MARK = "FEDCROSS_FAMILY"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PROC = Path("/proc")
_GRACE_SECONDS = 5.0
#: A device that was killed is refused for up to a minute, until the SuperLink takes it for lost.
MOST_RESTARTS, RESTARTS_S = 12, 300.0


class Family:
    """The processes of one federation; as a context manager, it ends all of them.

    Parameters
    ----------
    logs : Path
        Folder that gets one ``NAME.log`` with the output of each process.
    environment : mapping
        Environment of all processes.
    scratch : sequence of Path
        Folders that the watchdog removes if this process dies, as they may hold keys.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str], scratch: Sequence[Path] = ()) -> None:
        self.logs = logs
        self._scratch = [str(folder.resolve()) for folder in scratch]
        self.mark = secrets.token_hex(16)
        self._environment = {**environment, MARK: self.mark}
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Sequence[str]] = {}
        self._restarts: dict[str, list[float]] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # The pipe closes however this process ends. The watchdog itself must not carry the mark.
        code = "import sys; sys.path.insert(0, sys.argv[1])\n"
        code += "from fedcross.engines.processes import watch; watch(*sys.argv[2:])"
        root = str(import_root())
        self._watchdog = subprocess.Popen(
            [sys.executable, "-c", code, root, self.mark, *self._scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start `command` in its own session, so that Ctrl-C reaches only this process; log its output to a file."""
        with open_own(self.log(name), "ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise FederationError(
                    f"{command[0]}: cannot be started ({error.strerror}). Is Flower installed?"
                ) from error
        self._members[name], self._commands[name] = process, command
        return process

    def revive(self) -> list[str]:
        """Start the processes that have ended again, each after a pause; return the names of those started.

        Raises
        ------
        FederationError
            If a process ends :data:`MOST_RESTARTS` times within :data:`RESTARTS_S` seconds.
        """
        now, started = time.monotonic(), []
        for name in self.ended():
            times = [one for one in self._restarts.get(name, []) if now - one < RESTARTS_S]
            if len(times) >= MOST_RESTARTS:
                raise self.failure(name, f"{name} ended {len(times)} times in {RESTARTS_S:.0f} s.")
            if not times or now - times[-1] >= len(times):
                self._restarts[name] = [*times, now]
                self.start(name, self._commands[name])
                started.append(name)
        return started

    def log(self, name: str) -> Path:
        """Return the path of the log of process `name`."""
        return self.logs / f"{name}.log"

    def ended(self) -> list[str]:
        """Return the names of the processes that have ended, in the order of their start."""
        return [name for name, process in self._members.items() if process.poll() is not None]

    def failure(self, name: str, what: str) -> FederationError:
        """Return an error with the text `what` and the last lines of the log of `name`."""
        return FederationError(f"{what}\nEnd of {self.log(name)}:\n{tail(self.log(name))}")

    def stop(self) -> None:
        """End all processes, first with SIGTERM, then with SIGKILL. Can be called twice."""
        alive = [process for process in self._members.values() if process.poll() is None]
        for process in alive:
            _signal(-process.pid, signal.SIGTERM)
        end_marked(self.mark, _GRACE_SECONDS)
        for process in alive:
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                # Only on systems without /proc, where marks cannot be searched.
                _signal(-process.pid, signal.SIGKILL)
                process.wait()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()


def marked(mark: str) -> list[int]:
    """Return the ids of all running processes that carry `mark` (Linux; elsewhere the list is empty)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            # An ended process whose parent has not waited for it has an empty environment.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def end_marked(mark: str, grace: float) -> None:
    """End all processes that carry `mark`: SIGTERM, then after `grace` seconds SIGKILL, also to new child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        signalled: set[int] = set()
        while (left := set(marked(mark))) and time.monotonic() < deadline:
            for pid in left - signalled:
                _signal(pid, number)
            signalled |= left
            time.sleep(0.05)


def watch(mark: str, *scratch: str) -> None:
    """Wait until standard input closes, then end what carries `mark` and remove the folders `scratch`."""
    sys.stdin.buffer.read()
    end_marked(mark, _GRACE_SECONDS)
    for folder in scratch:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def terminated_by_signal() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside the block, so that clean-up runs as it does for Ctrl-C.

    Only the main thread can set handlers. One that is there stays (:mod:`server.interrupts`).
    """

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        # The parent process may have set one of them to be ignored (nohup).
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tail(path: Path, lines: int = 30) -> str:
    """Return the last `lines` lines of a log, or a note that it is empty."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return "\n".join(ANSI.sub("", text).splitlines()[-lines:]) or "(the log is empty)"


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        (os.killpg if pid < 0 else os.kill)(abs(pid), number)
