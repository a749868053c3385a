"""The record of revoked keys beside the SuperLink's database, as a file: :mod:`barred` says what it is for."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import shlex
import stat
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

#: The record's name in the folder of the database.
FILE = "revoked-keys.json"


def beside(database: Path) -> Path:
    """Return where the record of this database lies."""
    return Path(os.path.realpath(database)).parent / FILE


def read(path: Path) -> dict[bytes, str]:
    """Return the keys in the record and since when each is revoked (ISO 8601); none if there is no record.

    Raises
    ------
    ValueError
        If it cannot be read, others can write it, or it is a link to where nothing is.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            told = json.loads(file.read())
        keys = {base64.b64decode(one["key"], validate=True): str(one["revoked"]) for one in told["keys"]}
    except FileNotFoundError as error:
        if not path.is_symlink():
            return {}
        target = os.path.realpath(path)
        raise ValueError(
            f"{path}: a link to {target}, which is not there, and it says which keys are revoked. Is its disk mounted? "
            f"If there never was one: echo '{{\"keys\": []}}' > {shlex.quote(target)}"
        ) from error
    except OSError as error:
        said = f"{path}: cannot be read ({error.strerror}), and it says which keys are revoked."
        raise ValueError(f"{said} {_cure(path, error)}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path}: no readable record of revoked keys ({error!r}). Bring its newest copy back. If there is none, "
            "remove it: the SuperLink makes it again of what its database has as revoked; revoke again what was "
            "revoked since, if the database is an older copy."
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{path}: mode {mode:o}, so others on this machine can take revoked keys off it. Close it: chmod 600 "
            f"{shlex.quote(str(path))}\nIf somebody may have changed it, compare it with a copy."
        )
    return keys


def _cure(path: Path, error: OSError) -> str:
    """Return what to do about a record that cannot be read."""
    if error.errno == errno.EISDIR:
        return "It is a folder: move that away, and bring the record's newest copy back."
    if error.errno == errno.ELOOP:
        return "It is a link that leads in a circle: put the record's newest copy in its place."
    return strangers(path) or "Run as the owner of the SuperLink's database."


def strangers(path: Path) -> str:
    """Return what to do about a record whose owner is not that of its folder, as when root has made it; "" if it is."""
    with contextlib.suppress(OSError):
        place = Path(os.path.realpath(path))
        owner, folder = place.stat().st_uid, place.parent.stat()
        if owner != folder.st_uid:
            return (
                f"User {owner} owns it, and user {folder.st_uid} its folder: chown {folder.st_uid}:{folder.st_gid} "
                f"{shlex.quote(str(place))}"
            )
    return ""


def open_folder(database: Path) -> str:
    """Return what to say of a folder in which others can replace the database and its record; "" of another one."""
    folder = beside(database).parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return (
        f"{folder}: mode {mode:o}, so others on this machine can replace the SuperLink's database and {FILE}, and let "
        f"revoked keys in: chmod o-w {shlex.quote(str(folder))}"
    )


def short(key: bytes) -> str:
    """Return a key's name in tables, as ``core.trust.admission.fingerprint`` does."""
    return hashlib.sha256(key).hexdigest()[:16]


class Record:
    """The keys that are revoked, in a file.

    Parameters
    ----------
    path : Path
        Of the file, which need not be there; of a link, what it leads to is written.
    database : Path, optional
        Whose owner gets what root writes, unless that is root: then the owner of the folder.

    Raises
    ------
    ValueError
        If it cannot be read.
    """

    def __init__(self, path: Path, database: Path | None = None) -> None:
        self._keys = read(path)  # of a link, before it is followed
        self.path, self._database = Path(os.path.realpath(path)), database
        self._turn, self._unwritten = threading.Lock(), False

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __iter__(self) -> Any:
        return iter(tuple(self._keys))

    def add(self, keys: Iterable[bytes]) -> None:
        """Record `keys` as revoked; they are on the disk at the end.

        Raises
        ------
        OSError
            If the file cannot be written; the next call writes these keys too.
        """
        with self._turn:
            new = [key for key in keys if key not in self._keys]
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._keys |= dict.fromkeys(new, now)
            self._unwritten = self._unwritten or bool(new)
            if self._unwritten:
                self._write()
                self._unwritten = False

    def _write(self) -> None:
        with contextlib.suppress(ValueError):  # another SuperLink's database in the same folder
            self._keys = read(self.path) | self._keys
        told = [
            {"key": base64.b64encode(key).decode(), "fingerprint": short(key), "revoked": when}
            for key, when in self._keys.items()
        ]
        part = self.path.with_name(f".{self.path.name}.part")
        part.unlink(missing_ok=True)  # another user's, root's perhaps, that was killed
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _inherit(descriptor, part.parent, self._database)
            file.write(json.dumps({"keys": told}, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _inherit(descriptor: int, folder: Path, database: Path | None) -> None:
    """Give what root writes to the owner of the database, or of the folder; the service's user must read it."""
    if os.geteuid() == 0:
        owner = folder.stat()
        if database is not None and database.exists() and database.stat().st_uid != 0:
            owner = database.stat()
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
