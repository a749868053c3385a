"""Processes as :mod:`subprocess` starts them, forked from one that has imported torch and Flower already.

A new Python takes two or three seconds of a core until it has imported them, more than most tests compute. A test
whose subject is the start of the interpreter, the imports, or a variable that a library reads when it is imported
keeps :mod:`subprocess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support import launcher
from tests.support.zygote import LARGEST

ROOT = Path(__file__).parents[2]
#: Seconds that the imports may take on a loaded machine.
PATIENCE_S = 600.0
#: The real one, whatever a test has put in its place.
PYTHON = sys.executable
#: The programs of Flower that a launcher may stand for, and Python.
PROGRAMS = (
    *("python", "flwr", "flwr-clientapp", "flwr-serverapp", "flwr-simulation"),
    *("flower-superexec", "flower-superlink", "flower-supernode"),
)


class Zygote:
    """The process that forks; a socket to it, and what it has said about the processes that have ended."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        self._open = False
        self._lock = threading.RLock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # Its first path is ROOT by -m. A PYTHONPATH would hide what an editable installation adds to the paths.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tests.support.zygote", str(theirs.fileno())],
                cwd=ROOT, env=own, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=self._log,
            )  # fmt: skip

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Return the number of a new process."""
        with self._lock:
            socket.send_fds(self.channel, [json.dumps(request).encode()], list(streams))
            deadline = time.monotonic() + PATIENCE_S
            while not self._started:
                self._listen(deadline - time.monotonic())
            return self._started.pop()

    def open(self, door: Path) -> None:
        """Have it listen at `door`, too."""
        with self._lock:
            self.channel.send(json.dumps({"door": str(door)}).encode())
            deadline = time.monotonic() + PATIENCE_S
            while not self._open:
                self._listen(deadline - time.monotonic())

    def status(self, pid: int, seconds: float) -> int | None:
        """Return the wait status of a process that has ended, None if it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                while pid not in self._ended and self._listen(0):
                    pass
                if pid in self._ended:
                    return self._ended[pid]
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([self.channel], [], [], min(left, 0.5))

    def _listen(self, seconds: float) -> bool:
        """Take in one message; return whether there was one."""
        if not select.select([self.channel], [], [], max(0.0, seconds))[0]:
            if seconds < 0:
                raise TimeoutError(f"no new process after {PATIENCE_S:.0f} s")
            return False
        text = self.channel.recv(LARGEST)
        if not text:
            self._log.seek(0)
            raise RuntimeError(f"the process that forks has ended: {self._log.read().decode(errors='replace')}")
        kind, pid, *status = json.loads(text)
        if kind == "open":
            self._open = True
        elif kind == "started":
            self._ended.pop(pid, None)  # numbers come back
            self._started.append(pid)
        else:
            self._ended[pid] = status[0]
        return True

    def end(self) -> None:
        """End it; what it forked goes on."""
        self.channel.close()
        self._process.wait(60)
        self._log.close()


_zygotes: dict[int, Zygote] = {}
_programs: dict[int, tempfile.TemporaryDirectory[str]] = {}


def zygote() -> Zygote:
    """Return the one of this process (a fork of it gets its own), started when it is first needed."""
    if os.getpid() not in _zygotes:
        _zygotes[os.getpid()] = Zygote()
    return _zygotes[os.getpid()]


def programs() -> Path:
    """Return a folder like the one in which Python lies, in which Python and Flower's programs are launchers."""
    if os.getpid() not in _programs:
        # A folder of its own, because the path of a socket has at most 107 bytes.
        _programs[os.getpid()] = folder = tempfile.TemporaryDirectory(prefix="fedcross-programs-")
        real, text = Path(PYTHON).parent, Path(launcher.__file__).read_text()
        for name in {*PROGRAMS, *(path.name for path in real.iterdir())}:
            if name in PROGRAMS:
                (Path(folder.name) / name).write_text(f"#!{PYTHON} -IS\n{text}")
                (Path(folder.name) / name).chmod(0o700)
            else:
                (Path(folder.name) / name).symlink_to(real / name)
        zygote().open(Path(folder.name) / "door")
    return Path(_programs[os.getpid()].name)


@contextlib.contextmanager
def started_warm() -> Iterator[None]:
    """Have what this process starts with ``sys.executable``, and what that starts, forked from the zygote."""
    before, sys.executable = sys.executable, str(programs() / "python")
    try:
        yield
    finally:
        sys.executable = before


def end() -> None:
    """End the zygote of this process, if it has one."""
    if own := _zygotes.pop(os.getpid(), None):
        own.end()
    if folder := _programs.pop(os.getpid(), None):
        folder.cleanup()


class Process:
    """What :class:`subprocess.Popen` is to a test; `command` is ``["-m", MODULE, ...]`` or ``["-c", CODE, ...]``.

    Parameters
    ----------
    command : sequence of str
        Arguments of Python; a leading ``sys.executable`` is left out.
    stdout, stderr : int or file
        As in :mod:`subprocess`: ``PIPE``, ``DEVNULL``, ``STDOUT`` or a file. Pipes are text.
    start_new_session : bool
        Whether it leads a session of its own. Otherwise it is in the tests' process group.
    umask : int
        Its umask, -1 for that of the tests.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] = subprocess.DEVNULL, stderr: int | IO[Any] = subprocess.DEVNULL,
        start_new_session: bool = False, umask: int = -1,
    ) -> None:  # fmt: skip
        words = [str(word) for word in command]
        self.args = words[1:] if words[0] == sys.executable else words
        assert self.args[0] in ("-m", "-c"), self.args
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        own = zygote()
        self._zygote = own
        request = {
            "arguments": self.args,
            "numbers": [0, 1, 2],
            "executable": sys.executable,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
            "umask": umask if umask >= 0 else _umask(),
        }
        with contextlib.ExitStack() as stack:
            silent = stack.enter_context(Path(os.devnull).open("r+b", buffering=0)).fileno()
            out, self.stdout = _stream(stdout, silent, stack)
            err, self.stderr = (out, None) if stderr == subprocess.STDOUT else _stream(stderr, silent, stack)
            self.pid = own.fork(request, [silent, out, err])

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._settled(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._settled(3600 if deadline is None else deadline - time.monotonic())) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _settled(self, seconds: float) -> int | None:
        if self.returncode is None:
            status = self._zygote.status(self.pid, seconds)
            self.returncode = None if status is None else os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End it if it runs, and close its pipes."""
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def run(
    command: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S, umask: int = -1,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `command` to its end and return exit code and output, as ``subprocess.run(capture_output=True, text=True)``.

    Its output goes to files, so that no pipe can be full.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Process(command, cwd=cwd, env=env, stdout=out, stderr=err, umask=umask)
        try:
            code = process.wait(timeout)
        finally:
            process.close()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(process.args, code, out.read(), err.read())


def _stream(wanted: int | IO[Any], silent: int, stack: contextlib.ExitStack) -> tuple[int, IO[str] | None]:
    """Return what the process writes into, and what a test reads from if it wants a pipe."""
    if wanted == subprocess.PIPE:
        reads, writes = os.pipe()
        stack.callback(os.close, writes)
        return writes, os.fdopen(reads, errors="replace")
    if wanted == subprocess.DEVNULL:
        return silent, None
    return (wanted if isinstance(wanted, int) else wanted.fileno()), None


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
