"""Connects a ClientApp to a trainer process that keeps torch and the data loaded between messages.

In a deployment, Flower starts a new ``flwr-clientapp`` process for each message. That process sends its work to the
trainer (:mod:`client.resident.process`) over a Unix socket in a folder that only its user can enter. It starts a
trainer if there is none.
A trainer serves one version of the code and one parent of ClientApps (Flower's SuperExec, which ends with its
SuperNode). The trainer ends when that parent ends.

Environment variables. ``FEDCROSS_TRAINER``: ``inside`` trains in the ClientApp's own process, ``resident`` always uses
the trainer, ``auto`` (default) uses it only in ``flwr-clientapp`` processes on Linux. ``FEDCROSS_RUNTIME``: the folder
in which the socket folder is made (default: the system's folder for temporary files). ``FEDCROSS_TRAINER_IDLE``:
seconds without work after which a trainer ends. One that loads a run gets as long, and at least half an hour.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path

from flwr.app import RecordDict
from flwr.common.logger import log

from fedcross.client.resident import channel
from fedcross.core import errors
from fedcross.core.errors import FedcrossError, ProtocolError, StorageError
from fedcross.core.paths import import_root

RUNTIME = "FEDCROSS_RUNTIME"
IDLE = "FEDCROSS_TRAINER_IDLE"
#: How often a message is tried: if the trainer dies, it is started once more.
ATTEMPTS = 2
IDLE_SECONDS = 1800.0
#: Longest time that the system waits for a socket (2^31 - 1 ms, 24 days): longer limits are cut down to it.
LONGEST_SECONDS = 2147483.0
_BACKLOG = 64
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Keeper:
    """The process with which the trainer ends: its id and its start time (the system reuses ids)."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Keeper:
        """Return the keeper with process id `pid`."""
        return cls(pid, started(pid))


def started(pid: int) -> str:
    """Return when process `pid` started, in clock ticks since boot; empty if it does not exist (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # field 22; the program's name, an earlier field, may contain spaces


@dataclass(frozen=True)
class Resident:
    """The resident trainer of one keeper and one version of the code.

    Parameters
    ----------
    keeper : Keeper
        The process that starts the ClientApps; default: this process's parent.
    root : Path
        Folder in which ``import fedcross`` finds the package; default: that of this process.
    work : str
        ``module:function`` that does the work, ``(task, overrides, content) -> content``.
    """

    keeper: Keeper = field(default_factory=lambda: Keeper.of(os.getppid()))
    root: Path = field(default_factory=import_root)
    work: str = "fedcross.client.workshop:do"

    @property
    def name(self) -> str:
        """The socket's name in its folder."""
        text = f"{self.keeper.pid}/{self.keeper.started}/{self.root}/{self.work}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def do(self, task: str, overrides: str, content: RecordDict, seconds: float) -> RecordDict:
        """Send `content` to the trainer and return its answer.

        Parameters
        ----------
        task : str
            ``train`` or ``evaluate``.
        overrides : str
            The run's configuration.
        content : RecordDict
            The content of the message.
        seconds : float
            Time limit for the answer; a trainer that takes longer with it is killed. One that still loads the run, and
            has not begun with it, goes on: it ends itself if that hangs.

        Raises
        ------
        FedcrossError
            The trainer's error, in its own class if fedcross defines it; ProtocolError if the trainer died twice or
            took too long.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._ask({"task": task, "overrides": overrides}, content, seconds)
            except (EOFError, ConnectionError):
                log(WARNING, "fedcross: the trainer ended while it worked (attempt %s of %s).", attempt, ATTEMPTS)
        raise ProtocolError(
            f"The trainer process ended {ATTEMPTS} times while it worked on this message. Look into the SuperNode's "
            "log; too little memory is the usual reason."
        )

    def prepare(self, overrides: str) -> None:
        """Ask the trainer to load what a run needs, and return at once; start a trainer if there is none."""
        with self._connect(_CONNECT_SECONDS) as connection:
            channel.send(connection, {"task": "prepare", "overrides": overrides})

    def _ask(self, head: dict[str, str], content: RecordDict, seconds: float) -> RecordDict:
        with self._connect(seconds) as connection:
            channel.send(connection, head, content)
            trainer = -1
            try:
                greeting, _ = channel.receive(connection)
                trainer = os.pidfd_open(int(greeting["pid"]))
                outcome, answer = channel.receive(connection)
            except TimeoutError as error:
                if trainer >= 0:
                    signal.pidfd_send_signal(trainer, signal.SIGKILL)
                raise ProtocolError(f"The trainer did not answer within {seconds:.0f} s.") from error
            except ProcessLookupError as error:
                raise EOFError("the trainer has ended") from error
            finally:
                if trainer >= 0:
                    os.close(trainer)
        if answer is None:
            raise _error(str(outcome["error"]), str(outcome["text"]))
        return answer

    def _connect(self, seconds: float) -> socket.socket:
        """Return a connection to the trainer; start a trainer if there is none."""
        with runtime_folder() as folder:
            try:
                return self._reach(folder, seconds)
            except (FileNotFoundError, ConnectionRefusedError):
                with locked(folder):
                    try:  # the process of another message may have started it meanwhile
                        return self._reach(folder, seconds)
                    except (FileNotFoundError, ConnectionRefusedError):
                        self._start(folder)
                        return self._reach(folder, seconds)

    def _reach(self, folder: int, seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(min(max(seconds, 1.0), LONGEST_SECONDS))
            connection.connect(address(folder, self.name))
            if not channel.same_user(connection):
                raise ProtocolError("The trainer's socket belongs to another user. Set FEDCROSS_RUNTIME to a folder.")
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self, folder: int) -> None:
        """Make the socket and start a trainer on it. Later connections wait until the trainer is ready."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            os.fchmod(listener.fileno(), 0o600)  # `bind` gives this mode to the file that it makes
            sweep(folder)
            listener.bind(address(folder, self.name))
            listener.listen(_BACKLOG)
            listener.set_inheritable(True)
            paths = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
            command = [
                *(sys.executable, "-P", "-m", "fedcross.client.resident.process"),
                *(str(listener.fileno()), self.name, str(self.keeper.pid), self.keeper.started, self.work),
            ]
            # In its own session, it gets no signals for Flower's process group; it watches its keeper instead.
            os.posix_spawn(
                sys.executable,
                command,
                {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsid=True,
            )


def _error(kind: str, text: str) -> FedcrossError:
    """Return the trainer's error: in its own class if fedcross defines it, else a FedcrossError that names it."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, FedcrossError) and found is not errors.UploadError:
        return found(text)
    return FedcrossError(f"{kind}: {text}")


@contextmanager
def runtime_folder() -> Iterator[int]:
    """Open the folder of this user's sockets, creating it if needed; yield its descriptor.

    Raises
    ------
    StorageError
        If it cannot be made, or if other users may enter it.
    """
    base = Path(os.environ.get(RUNTIME) or tempfile.gettempdir())
    path = base / f"fedcross-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be made or opened ({error.strerror}). Set {RUNTIME} to a folder."
        ) from error
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StorageError(
                f"{path}: others may enter this folder (mode {stat.S_IMODE(found.st_mode):o}, owner {found.st_uid}). "
                f"Remove it, or set {RUNTIME} to a folder of your own."
            )
        yield folder
    finally:
        os.close(folder)


def address(folder: int, name: str) -> str:
    """Return a short path of socket `name` in the open `folder`; the system allows at most 108 bytes."""
    return f"/proc/self/fd/{folder}/{name}.sock"


def remove(folder: int, name: str) -> None:
    """Remove socket `name`, if it exists."""
    try:
        os.unlink(f"{name}.sock", dir_fd=folder)
    except FileNotFoundError:
        return


def sweep(folder: int) -> None:
    """Remove the sockets on which no process listens. The caller holds the lock, so none is just being made."""
    for file in os.listdir(folder):
        name = file.removesuffix(".sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(address(folder, name))
            except ConnectionRefusedError:
                remove(folder, name)
            except OSError:
                continue


@contextmanager
def locked(folder: int) -> Iterator[None]:
    """Hold the lock of the open `folder` inside the block; trainers start and end only under this lock."""
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)


def wait_for(descriptors: list[int], seconds: float | None = None) -> set[int]:
    """Wait at most `seconds` and return those of `descriptors` that can be read or were closed by the other side.

    Of :data:`LONGEST_SECONDS` and more, only the former are waited.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
    return {found for found, _ in poller.poll(None if seconds is None else min(seconds, LONGEST_SECONDS) * 1000)}
