"""The ClientApp's way to a trainer that stays: Flower starts a process per message, torch and data are loaded once.

In a deployment Flower runs each message in a ``flwr-clientapp`` process of its own. That process hands its work to the
trainer (:mod:`client.resident.process`) over a Unix socket in a folder that only its user can enter, and starts a
trainer if there is none.
A trainer belongs to the process that starts the ClientApps (Flower's SuperExec, which ends with its SuperNode) and to
one version of our code, and ends with it.

``FEDCROSS_TRAINER``: ``inside`` trains in the ClientApp's own process, ``resident`` always hands over, ``auto``
(default) hands over exactly in ``flwr-clientapp`` processes on Linux. ``FEDCROSS_RUNTIME``: where the folder is made;
the system's folder for temporary files unless set. ``FEDCROSS_TRAINER_IDLE``: seconds without work after which a
trainer ends.
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
#: A trainer that died is started again once for the same message.
ATTEMPTS = 2
IDLE_SECONDS = 1800.0
_BACKLOG = 64
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Keeper:
    """A process whose end is the trainer's end: its id and when it started (ids are used again)."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Keeper:
        """Return the keeper with process id `pid`."""
        return cls(pid, started(pid))


def started(pid: int) -> str:
    """Return when process `pid` started, in clock ticks since boot; empty if there is none (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # field 22; the program's name before it may hold spaces


@dataclass(frozen=True)
class Resident:
    """The resident trainer of one keeper and one version of the code.

    Parameters
    ----------
    keeper : Keeper
        The process that starts the ClientApps; default: this process's parent.
    root : Path
        Folder in which ``import fedcross`` finds the package; default: this process's.
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
        """Return what the trainer answers to `content`.

        Parameters
        ----------
        task : str
            ``train`` or ``evaluate``.
        overrides : str
            The run's configuration.
        content : RecordDict
            Of the message.
        seconds : float
            Until the answer must be there; a trainer that takes longer is ended.

        Raises
        ------
        FedcrossError
            What the trainer met, with its own class where it is one of ours; ProtocolError if it died twice or took
            too long.
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
        """Let the trainer, started if need be, load what a run needs; returns at once."""
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
        """Return a connection to the trainer, started if there is none."""
        with runtime_folder() as folder:
            try:
                return self._reach(folder, seconds)
            except (FileNotFoundError, ConnectionRefusedError):
                with locked(folder):
                    try:  # another message's process may have been faster
                        return self._reach(folder, seconds)
                    except (FileNotFoundError, ConnectionRefusedError):
                        self._start(folder)
                        return self._reach(folder, seconds)

    def _reach(self, folder: int, seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(seconds, 1.0))
            connection.connect(address(folder, self.name))
            if not channel.same_user(connection):
                raise ProtocolError("The trainer's socket belongs to another user. Set FEDCROSS_RUNTIME to a folder.")
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self, folder: int) -> None:
        """Make the socket and start a trainer on it. Whoever connects from now on waits until it is ready."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            os.fchmod(listener.fileno(), 0o600)  # becomes the mode of the file that bind makes
            sweep(folder)
            listener.bind(address(folder, self.name))
            listener.listen(_BACKLOG)
            listener.set_inheritable(True)
            paths = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
            command = [
                *(sys.executable, "-P", "-m", "fedcross.client.resident.process"),
                *(str(listener.fileno()), self.name, str(self.keeper.pid), self.keeper.started, self.work),
            ]
            # A session of its own: a signal to Flower's group is not for it, it watches its keeper.
            os.posix_spawn(
                sys.executable,
                command,
                {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsid=True,
            )


def _error(kind: str, text: str) -> FedcrossError:
    """Return the trainer's error; of a class that is not ours as a plain one that names it."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, FedcrossError) and found is not errors.UploadError:
        return found(text)
    return FedcrossError(f"{kind}: {text}")


@contextmanager
def runtime_folder() -> Iterator[int]:
    """Open the folder of this user's sockets, made if it is not there; yields its descriptor.

    Raises
    ------
    StorageError
        If it cannot be made, or others than this user may enter it.
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
    """Return a path of socket `name` in the open `folder`: short whatever the folder's own path (108 bytes at most)."""
    return f"/proc/self/fd/{folder}/{name}.sock"


def remove(folder: int, name: str) -> None:
    """Remove socket `name`, if it is there."""
    try:
        os.unlink(f"{name}.sock", dir_fd=folder)
    except FileNotFoundError:
        return


def sweep(folder: int) -> None:
    """Remove the sockets that nobody listens on; under the lock, so that none is just being made."""
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
    """Hold the lock of the open `folder`, under which trainers start and end."""
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)


def wait_for(descriptors: list[int], seconds: float | None = None) -> set[int]:
    """Return which of `descriptors` can be read or have been hung up, after `seconds` at the latest."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
    return {found for found, _ in poller.poll(None if seconds is None else seconds * 1000)}
