"""Starts the long-running programs of a deployment: checks their files, turns telemetry off, then calls ``exec``.

By itself, Flower accepts a key that all users can read, and turns on telemetry, update check and installation of
dependencies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import shutil
import sqlite3
import stat
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from fedcross.core.errors import ConfigError, StorageError, quoted
from fedcross.core.links import dangling
from fedcross.core.paths import page
from fedcross.core.private_files import check_folder
from fedcross.core.trust import certificates, lasting
from fedcross.core.trust.admission import check_partition
from fedcross.core.trust.keys import SECRET, KeyPair
from fedcross.deploy import tokens
from fedcross.deploy.federation import GATEWAY
from fedcross.engines import guarded
from fedcross.engines.executor import operators, program, recorded

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
SUPERLINK_PORT = 8000
DOCS = f"{page('deploy.md')}, The operator's token"
#: Ends of the names of the files beside a database: the SuperLink's lock (:func:`hold`), and SQLite's.
LOCK = ".lock"
BESIDE = (LOCK, "-wal", "-shm")
#: Seconds until a SuperLink that has been asked to end counts as one that runs: those that it takes for calls under
#: way (:mod:`engines.executor.closing`), and some more.
ENDS_S = 15.0
#: Seconds for which a locked database is asked again: as long as the SuperLink's own calls wait for it.
LOCKED_S = 5.0
#: With a week left, a certificate can be rotated in working hours.
SOON = timedelta(days=7)


def superlink(server: Path, secret: Path, database: Path, host: str) -> list[str]:
    """Return the SuperLink's command: with TLS, only registered SuperNodes, apps in another process, state on disk.

    Parameters
    ----------
    server : Path
        Folder with ``ca.crt``, ``server.crt``, ``server.key``.
    secret : Path
        Folder with the SuperExec's secret.
    database : Path
        SQLite file.
    host : str
        Address to listen on. Anyone who reaches it can control the federation.
    """
    pair = KeyPair(server / "server.crt", server / "server.key")
    check_folder(server)
    certificates.check_key(pair.private)
    _dates(pair.public, server / "ca.crt")
    if not check_operator():
        said = "is not set: who reaches this port can start and stop runs"
        print(f"{operators.VARIABLE} {said} ({DOCS})", file=sys.stderr)
    check_database(database)
    if not database.resolve().parent.is_dir():
        raise StorageError(
            f"--database {database}: {database.resolve().parent} is no folder. Make it, or name another."
        )
    if said := _new(database):
        print(said, file=sys.stderr)
    if said := recorded.open_folder(database):
        print(said, file=sys.stderr)
    return [
        *(sys.executable, "-m", "fedcross.deploy.patience", "flower-superlink"),
        *("--host", host, "--port", str(SUPERLINK_PORT), "--isolation", "process"),
        *("--ssl-certfile", str(pair.public), "--ssl-keyfile", str(pair.private)),
        *("--ssl-ca-certfile", str(server / "ca.crt"), "--enable-supernode-auth"),
        *("--superexec-auth-secret-file", str(certificates.check_key(secret / SECRET))),
        *("--database", str(database), "--disable-runtime-dependency-installation"),
    ]


def check_database(path: Path) -> None:
    """Raise StorageError if SQLite cannot use the file `path`, or the record of revoked keys beside it is none.

    A new or empty database is made by Flower. What it takes for a database in memory, or for an address, is refused: no
    record is kept beside that, so that a restart would let revoked keys in.
    """
    if re.match(r"[a-z0-9+]*:/|:", str(path), re.IGNORECASE):  # a path has one slash of two
        raise StorageError(
            f"--database {path}: name a file. A database in memory, or one with an address, keeps no revoked key out "
            "after a restart. (A file of such a name: give its whole path.)"
        )
    try:
        recorded.read(recorded.beside(path))
    except ValueError as error:
        raise StorageError(str(error)) from error
    if said := dangling(path):
        target = quoted(path.resolve())
        raise StorageError(f"--database {said} Is its disk mounted? If the file is to be made there: touch {target}")
    if path.is_dir():
        raise StorageError(f"--database {path}: a folder. Name the file, {quoted(path / 'superlink.db')} perhaps.")
    if said := closed(path):
        raise StorageError(f"--database {said}")
    if path.exists():
        _ask(path, "SELECT count(*) FROM sqlite_master")


def closed(database: Path) -> str:
    """Return what to say if this user may not read and write the database and its folder; "" if it may."""
    place = database.resolve()
    files = [place.with_name(f"{place.name}{end}") for end in ("", *BESIDE)]
    for path, needed in ((place.parent, os.W_OK | os.X_OK), *((file, os.R_OK | os.W_OK) for file in files)):
        if not path.exists() or os.access(path, needed):
            continue
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return f"{database}: {path} is on a disk that nobody can write (Read-only file system)."
        found, user = path.stat(), os.geteuid()
        said = f"{database}: user {user} may not write {path} (mode {stat.S_IMODE(found.st_mode):o}, of user "
        if found.st_uid == user:
            return f"{said}{user}): chmod u+rw{'x' if path.is_dir() else ''} {quoted(path)}"
        return f"{said}{found.st_uid}). Run as that user. If it is to be this one's: chown {user} {quoted(path)}"
    return ""


def check_unlocked(database: Path) -> None:
    """Raise StorageError if another program keeps the SuperLink from writing its database; nothing is written."""
    _ask(database, "BEGIN IMMEDIATE")


def _ask(path: Path, statement: str) -> None:
    """Execute `statement` in the database, and take it back; raise StorageError if it cannot be."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)) as database:
            database.execute(statement).fetchone()
            if database.in_transaction:
                database.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise StorageError(f"--database {path}: {error}. {_cure(path, error)}") from error


def _cure(path: Path, error: sqlite3.Error) -> str:
    """Return what to do about a database that SQLite refuses: only one that is damaged needs a copy."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return (
            f"Another program holds it (fuser -v {quoted(path)} shows which), and the SuperLink answers with errors "
            "meanwhile. Wait until that has ended, or stop it, and try again. The database is good: leave it as it is."
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return (
            "Bring it back from a copy, or name a new file in the same folder, in which every device must be "
            f"registered again. Leave {recorded.FILE} there as it is: it keeps out what was revoked."
        )
    return (
        "Look at its disk, at its owner and mode and at those of its folder (the SuperLink writes other files beside "
        "it). The database may be good: leave it as it is until you know."
    )


def _new(database: Path) -> str:
    """Return what to say of a database that is not there yet or is empty; "" of another one."""
    if database.exists() and database.stat().st_size:
        return ""
    revoked = recorded.read(recorded.beside(database))
    none = f"keys revoked: {len(revoked)} ({recorded.FILE})" if revoked else "none is revoked"
    return f"--database {database.resolve()}: new: no device is registered here, {none}"


def gateway_of(server: Path) -> dict[str, str]:
    """Return the variable with which the SuperLink takes devices' calls from the gateway only, if it has a token."""
    file = server / GATEWAY
    if file.exists():
        tokens.check(file)
        return {guarded.GATEWAY: str(file)}
    print(
        f"{file} is missing: who reaches this port can call as a device, past the gateway. Make it with "
        "fedcross deploy federation, and restart the gateway too",
        file=sys.stderr,
    )
    return {}


def superexec(folder: Path, address: str, health: str) -> list[str]:
    """Return the command of the SuperExec, which starts the ServerApps and gives them its variables."""
    check_operator()
    try:
        operators.token(os.environ, operators.PAGE, shortest=1)
    except ValueError as error:
        raise StorageError(str(error)) from error
    authority = folder / "ca.crt"
    _dates(authority, authority)
    return [
        *guarded.command("flower-superexec"),
        *("--runtime-api-address", address, "--root-certificates", str(authority)),
        *("--superexec-auth-secret-file", str(certificates.check_key(folder / SECRET))),
        *("--health-server-address", health),
    ]


def supernode(
    folder: Path, name: str, address: str, partition: int, partitions: int, port: int, width: float | None = None
) -> list[str]:
    """Return the command of a device: its SuperNode, and the executor that answers its messages.

    Parameters
    ----------
    folder : Path
        Holds ``ca.crt``, ``NAME-node.key`` and the secret ``superexec.key``.
    name : str
        The device's name.
    address : str
        ``host:port`` of the gateway.
    partition, partitions : int
        The device's number in the federation, from 0, and how many there are.
    port : int
        Loopback port between the two.
    width : float, optional
        The share of a model's channels that the device can train (docs/heterogeneous.md); None says nothing of it.
    """
    check_width(width)
    check_folder(folder)
    authority = folder / "ca.crt"
    _dates(authority, authority)
    if not 0 <= partition < partitions:
        raise StorageError(f"partition {partition}: devices are numbered 0 to {partitions - 1} (partitions).")
    check_partition(partition)
    secret = str(certificates.check_key(folder / SECRET))
    return [
        *(*program.command("supervisor"), "--port", str(port), "--secret", secret, "--", "flower-supernode"),
        *("--superlink", address, "--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(certificates.check_key(folder / f"{name}-node.key"))),
        # Without a secret, every local user could take the device's messages from this port.
        *("--host", "127.0.0.1", "--port", str(port), "--isolation", "process"),
        *("--superexec-auth-secret-file", secret),
        *("--node-config", f"partition-id={partition} num-partitions={partitions}" + _told(width)),
    ]


def check_operator() -> str:
    """Return the operator's token; "" if no variable names its file, StorageError if there is none in it."""
    name = os.environ.get(operators.VARIABLE)
    if not name:
        return ""
    try:
        operators.refuse_text(name)
    except ValueError as error:
        raise StorageError(str(error)) from error
    return tokens.check(Path(name), variable=operators.VARIABLE)


def check_width(width: float | None) -> None:
    """Raise a ConfigError unless `width` is one of a device."""
    if width is not None and not 0 < width <= 1:
        raise ConfigError(f"--width {width:g}: give a number above 0, up to 1.")


def _told(width: float | None) -> str:
    return "" if width is None else f" device.width={width:g}"


def environment(before: Mapping[str, str]) -> dict[str, str]:
    """Return `before` with telemetry, update check and installation off, and this Python's folder first on PATH."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, before.get("PATH", os.defpath)])
    return {**before, **SWITCHES, "PATH": path}


def replace_process(command: list[str], umask: int = 0o077) -> NoReturn:
    """Become `command`."""
    os.umask(umask)
    settings = environment(os.environ)
    os.execve(_program(command[0], settings), command, settings)  # noqa: S606 - a list of our own, no shell


def hold(database: Path) -> int:
    """Lock `database` for this process and the program that it becomes; return the lock's file descriptor.

    The file ``DATABASE.lock`` beside it stays; only a lock on it counts, which ends with the process. Where the file
    system knows no locks, none is taken. A SuperLink that is just ending is waited for.

    Raises
    ------
    StorageError
        If a SuperLink runs with this database, or the file has one more name, under which another could.
    """
    place = Path(os.path.realpath(database))
    lock = _made(place.with_name(f"{place.name}{LOCK}"), database)
    latest, told = time.monotonic() + ENDS_S, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= latest:
                os.close(lock)
                raise StorageError(
                    f"--database {database}: a SuperLink runs with it (fuser {quoted(place)} says which). Stop that "
                    "one, and wait until its process has ended."
                ) from error
            if not told:
                say = f"--database {database}: a SuperLink runs with it, or is ending. Waiting for {ENDS_S:.0f} s."
                print(say, file=sys.stderr, flush=True)
                told = True
        except OSError:
            break
        time.sleep(0.1)
    os.close(_made(place, database))  # an empty one, of the right owner: SQLite's other files get that owner too
    if (names := place.stat().st_nlink) > 1:
        os.close(lock)
        raise StorageError(
            f"--database {database}: the file has {names} names (hard links), and two SuperLinks under two names would "
            f"damage it. Remove the other one: find / -xdev -samefile {quoted(place)}"
        )
    os.set_inheritable(lock, True)
    return lock


def _made(path: Path, database: Path) -> int:
    """Open a file of the `database` and return its descriptor; one that root makes is given to its folder's owner."""
    try:
        there, folder = path.exists(), path.parent.stat()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not there and os.geteuid() == 0:
            with contextlib.suppress(PermissionError):  # a container's root without that right
                os.fchown(descriptor, folder.st_uid, folder.st_gid)
    except OSError as error:
        raise StorageError(f"--database {database}: {path} cannot be opened ({error.strerror}).") from error
    return descriptor


def limit_memory(size: str) -> None:
    """Give this process, and each that it starts, a limit of memory of its own.

    Parameters
    ----------
    size : str
        Bytes, or a number with the unit ``k``, ``m`` or ``g`` (powers of 1024), as in the compose file.

    Raises
    ------
    ConfigError
        If `size` is no such number.
    """
    found = re.fullmatch(r"([1-9][0-9]*)([kmg]?)b?", size.strip().lower())
    if found is None:
        raise ConfigError(f"--memory {size}: give bytes, or a number with k, m or g, for example 3g.")
    limit = int(found[1]) * 1024 ** " kmg".index(found[2] or " ")
    # What a process can write to, without what it shares: a mapped library does not count.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _program(name: str, settings: Mapping[str, str]) -> str:
    program = shutil.which(name, path=settings["PATH"])
    if program is None:
        raise StorageError(f"{name}: not found beside {sys.executable} nor on PATH. Install fedcross again.")
    return program


def _dates(certificate: Path, authority: Path) -> None:
    """Refuse an expired certificate, and warn if it expires soon."""
    if certificate == authority:
        left = certificates.validity(certificate)
    else:
        left = certificates.check_certificate(certificate, authority)
    if left < SOON:
        print(f"{certificate}: {left.days} days left, {lasting.renewal(certificate, authority)}", file=sys.stderr)
