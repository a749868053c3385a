"""Files of a run and of a federation that only their owner reads.

What a run writes (uploads, checkpoints, models, logs) tells about the data of the clients. Its files have mode 0600 in
folders of mode 0700. With ``FEDCROSS_SHARE=group``, which the compose file sets, the group may read them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import IO, Any

from fedcross.core.errors import StorageError, remedy
from fedcross.core.replacing import PART, replacing, sync_folder

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
#: Environment variable: ``group`` lets the group read the files of runs.
SHARE = "FEDCROSS_SHARE"


def private_folder(path: Path) -> Path:
    """Create the folder `path` with mode 0700 if it is missing; raise StorageError if that is not possible."""
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: this folder cannot be made ({error.strerror}). Choose another one.") from error
    return path


def write_private(path: Path, content: bytes) -> None:
    """Write a secret atomically with mode 0600."""
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that everybody may read (a certificate, a public key) atomically."""
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        with replacing(path, mode) as file:
            file.write(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}). {remedy(error).capitalize()}.") from error


def own_folder(path: Path) -> Path:
    """Create the folder `path` for a run's files, or close it to others if this user owns it; return it."""
    path.mkdir(parents=True, mode=0o777 & ~_closed(), exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's folder: only its owner can close it
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _closed():
            path.chmod(mode & ~_closed())
    return path


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file of a run, as ``open`` does; it is closed to others from its first byte on.

    A symbolic link is not followed: it could lead what is written to another file.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, 0o666 & ~_closed())
        with contextlib.suppress(PermissionError):
            found = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if found & _closed():
                os.fchmod(descriptor, found & ~_closed())
        return descriptor

    return open(path, mode, opener=opener)


def open_lines(path: Path) -> IO[str]:
    """Open a file of a run to append lines; a last line that a crash has cut off is ended first, so none joins it."""
    cut = False
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            cut = file.read() != b"\n"
    lines: IO[str] = open_own(path, "a")
    if cut:
        lines.write("\n")
    return lines


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file of a run so that a crash leaves either the old file or the new one, never a part.

    Only this user can read the file (:func:`open_own`). One process at a time may write it.
    """
    part = path.with_name(path.name + PART)
    with open_own(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def close_own(path: Path) -> None:
    """Close a file of a run to others, if this user owns it and it is open."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & _closed() and not path.is_symlink():
            path.chmod(mode & ~_closed())


def _closed() -> int:
    """Return the permissions that files of runs do not have."""
    return stat.S_IWGRP | stat.S_IRWXO if os.environ.get(SHARE) == "group" else _OTHERS
