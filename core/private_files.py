"""Reads and writes files that hold secrets, and refuses unsafe ones; makes the files of runs private.

Keys are readable by their owner only (0600, in folders 0700). A key that others can read is treated as lost: the
functions here refuse to use it and say what to do, instead of repairing it silently.

What a run writes (uploads, checkpoints, models, logs) has the same modes, because a model tells about the data of the
clients that trained it. ``FEDCROSS_SHARE=group`` lets the folder's group read it (0640, 0750): the compose file sets
it, as there the server has a user of its own. Others never can. Such a file that is found open is closed, not refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fedcross.core import exposed
from fedcross.core.errors import StorageError, quoted, remedy
from fedcross.core.links import dangling, followed, refuse_link
from fedcross.core.replacing import PART, inherit, replacing, sync_folder

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
#: Environment variable: ``group`` lets the group read the files of runs.
SHARE = "FEDCROSS_SHARE"


def private_folder(path: Path) -> Path:
    """Create `path` as a folder only its owner can enter, or check that it is one.

    Raises
    ------
    StorageError
        If it cannot be made, is no folder, or is open to group or others.
    """
    _check_mode(present_folder(path), "700")
    return path


def present_folder(path: Path) -> Path:
    """Create `path` for its owner only if it is missing; return it, or raise StorageError if it is no folder."""
    try:
        make_folder(path)
    except OSError as error:
        if not _seen(path, Path.is_dir):
            if said := dangling(path):
                raise StorageError(f"{said} Is its disk mounted?") from error
            raise StorageError(f"{path}: this folder cannot be made ({error.strerror}). Choose another one.") from error
    return path


def make_folder(path: Path) -> None:
    """Create `path`, and the folders above that are missing, for their owner only; raise OSError if it cannot be."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
            make_folder(path.parent)
        path.mkdir(mode=0o700)
    inherit(path, path.parent)


def check_place(path: Path) -> Path:
    """Return `path` if no other user can rename what lies in this folder, or if it is missing; else raise StorageError.

    A folder in which files belong to who made them (the sticky bit, as ``/tmp`` has it) is good.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StorageError(
                f"{path}: mode {mode:o}, so others on this machine can put keys of theirs there: "
                f"chmod o-w {quoted(path)}"
            )
    return path


def check_folder(path: Path) -> Path:
    """Return `path` if it is a folder that only its owner can enter; else raise StorageError."""
    if not _seen(path, Path.is_dir):
        raise StorageError(
            f"{path}: no such folder of keys. fedcross deploy federation makes a server's, fedcross deploy new-client "
            "a device's."
        )
    _check_mode(path, "700")
    return path


def check_private(path: Path) -> Path:
    """Return `path` if it is a file that only its owner can read.

    Raises
    ------
    StorageError
        If it is missing, is no regular file, is open to group or others, or this user may not read it.
    """
    if not _seen(path, Path.is_file):
        if path.is_dir():
            then = _maker(path).replace("Bring", "Then bring", 1)
            if _full(path):
                raise StorageError(
                    f"{path}: is a folder, not a file, and not empty. Move it to where it belongs. {then}"
                )
            raise StorageError(
                f"{path}: is a folder, not a file (Docker makes one for a file that was missing when a container "
                f"started). Remove it: rmdir {quoted(path)}\n{then}"
            )
        there = dangling(path) or f"{path}: no such key file."
        raise StorageError(f"{there} {_maker(path)}")
    _check_mode(path, "600")
    return check_readable(path)


def _full(folder: Path) -> bool:
    """Return whether something is in a folder, or this user may not look."""
    try:
        return any(folder.iterdir())
    except OSError:
        return True


def _maker(path: Path) -> str:
    """Return what to do about a key or token that is missing."""
    if path.stem.endswith("-node"):
        return "Bring it back. If it is lost: fedcross deploy rotate-key makes a new one, in the device's bundle."
    return "Bring it back. If it is lost: fedcross deploy federation makes a new one, or says how."


def check_readable(path: Path) -> Path:
    """Return `path` if this user may read the file; else raise StorageError."""
    if not os.access(path, os.R_OK):
        raise StorageError(f"{path}: Permission denied, user {os.getuid()} may not read it. {exposed.unreadable(path)}")
    return path


def _seen(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except PermissionError as error:
        raise StorageError(
            f"{path}: user {os.getuid()} may not look there. Run as the owner of the keys (a device in a container: "
            "DEVICE_USER in its .env)."
        ) from error


def _check_mode(path: Path, wanted: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS and path.is_dir() and not any(path.iterdir()):
        raise StorageError(
            f"{path}: mode {mode:o}. Close it before there are keys in it: chmod {wanted} {quoted(path)}"
        )
    if mode & _OTHERS:
        raise StorageError(f"{path}: mode {mode:o}, so others on this machine can use it. {exposed.cure(path, wanted)}")


def write_private(path: Path, content: bytes) -> None:
    """Write a secret atomically, with mode 0600 from the first byte on; a file is replaced, a link refused."""
    refuse_link(path)
    _write(path, content, 0o600)


def write_record(path: Path, content: bytes) -> None:
    """Write a private file that is no key as :func:`write_private` does; a link is followed (:mod:`core.links`)."""
    _write(followed(path), content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that everybody may read (a certificate, a public key), atomically; a link is followed."""
    _write(followed(path), content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        with replacing(path, mode) as file:
            file.write(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}). {remedy(error).capitalize()}.") from error


def give(path: Path, owner: os.stat_result) -> None:
    """Give the file the owner that another one had: what root replaces stays readable for who uses it.

    A link stays as it is, and a file with a second name (a hard link): root would give away any file.

    Raises
    ------
    StorageError
        If this user may not.
    """
    try:
        found = path.lstat()
        other = stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1)
        if (found.st_uid, found.st_gid) != (owner.st_uid, owner.st_gid) and not other:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    except OSError as error:
        whose = f"{owner.st_uid}:{owner.st_gid}"
        command = f"chown {whose} {quoted(path)}"
        raise StorageError(f"{path}: cannot be given to {whose} ({error.strerror}): {command}") from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block for this folder, and wait for the others; nothing is written there.

    Where this user may not list the folder, or the file system knows no locks, nobody waits. The block must not ask for
    the same folder again: it would wait for itself.

    Raises
    ------
    StorageError
        If there is no such folder.
    """
    descriptor = None
    try:
        with contextlib.suppress(PermissionError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(
            f"{folder}: no such folder ({error.strerror}). Make it: fedcross deploy authority."
        ) from error
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


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
