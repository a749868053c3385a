"""Files of a run and of a federation: closed to other users, written atomically; JSON that every reader takes.

What a run writes (uploads, checkpoints, models, logs) tells about the data of the clients. Its files have mode 0600 in
folders of mode 0700. With ``FEDCROSS_SHARE=group``, which the compose file sets, the group may read them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fedcross.core.errors import StorageError, remedy

#: Environment variable: ``group`` lets the group read the files of runs.
SHARE = "FEDCROSS_SHARE"
#: Ends the name of a file that is being written.
PART = ".part"
#: The only key of a JSON object that stands for a number which JSON does not have.
_MARK = "$float"


def own_folder(path: Path) -> Path:
    """Create the folder `path` for a run's files, or close it to others if this user owns it; return it."""
    path.mkdir(parents=True, mode=0o777 & ~_closed(), exist_ok=True)
    close_own(path.resolve())
    return path


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file of a run, as ``open`` does; it is closed to others from its first byte on.

    A symbolic link is not followed: it could lead what is written to another file.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, 0o666 & ~_closed())
        close_own(descriptor)
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


def close_own(path: Path | int) -> None:
    """Close a file or folder (its path or descriptor) to others, if this user owns it and it is open."""
    with contextlib.suppress(OSError):
        mode = (os.fstat(path) if isinstance(path, int) else path.lstat()).st_mode
        if mode & _closed() and not stat.S_ISLNK(mode):
            os.chmod(path, stat.S_IMODE(mode) & ~_closed())  # noqa: PTH101 - takes a descriptor too


def _closed() -> int:
    """Return the permissions that files of runs do not have."""
    return stat.S_IWGRP | stat.S_IRWXO if os.environ.get(SHARE) == "group" else stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a new file that gets the name `path` at the end of the block, once it is on the disk.

    A crash leaves the old file or the new one, never a part. One process at a time may write it. `mode` is the file's;
    by default only those can read it who may read the files of runs.
    """
    part = path.with_name(path.name + PART)
    try:
        with open_own(part, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # a folder that this user may not list
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of the folder `path` to disk (fsync)."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file of a run with :func:`replacing`."""
    with replacing(path) as file:
        file.write(data)


def private_folder(path: Path) -> Path:
    """Create the folder `path` with mode 0700 if it is missing; raise StorageError if that is not possible."""
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: this folder cannot be made ({error.strerror}). Choose another one.") from error
    return path


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a secret atomically; raise StorageError if that is not possible."""
    try:
        with replacing(path, mode) as file:
            file.write(content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}). {remedy(error).capitalize()}.") from error


def write_public(path: Path, content: bytes) -> None:
    """Write a file that everybody may read (a certificate, a public key) atomically."""
    write_private(path, content, 0o644)


def dumps(value: Any, **options: Any) -> str:
    """Return `value` as JSON; a float that is not finite becomes null. `options` are those of ``json.dumps``."""
    return _dumps(value, lambda _: None, options)


def dumps_exact(value: Any) -> str:
    """Return `value` as JSON from which :func:`loads_exact` makes an equal value, also if floats are not finite."""
    return _dumps(value, lambda number: {_MARK: repr(number)}, {})


def loads_exact(text: str) -> Any:
    """Return the value that :func:`dumps_exact` wrote; raise ValueError if `text` is no JSON."""
    return json.loads(text, object_hook=lambda found: float(found[_MARK]) if found.keys() == {_MARK} else found)


def _dumps(value: Any, stand_in: Callable[[float], Any], options: dict[str, Any]) -> str:
    """Return `value` as JSON without ``NaN`` and ``Infinity``, which most readers refuse (RFC 8259, section 6)."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare, so that values are searched only then
        return json.dumps(_replaced(value, stand_in), allow_nan=False, **options)


def _replaced(value: Any, stand_in: Callable[[float], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(entry, stand_in) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(entry, stand_in) for entry in value]
    return stand_in(value) if isinstance(value, float) and not math.isfinite(value) else value
