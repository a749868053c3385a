"""Reads small files in folders of other users: regular files only, and so many bytes at most.

Root works in the folder of a device, whose user can put anything there under any name: a pipe would keep the reader
waiting for ever, a link to ``/dev/zero`` would fill its memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fedcross.core.errors import StorageError

#: Most bytes of a key, a compose file or a unit.
MOST = 65536


def read_plain(path: Path) -> bytes:
    """Return a file's content.

    Raises
    ------
    OSError
        If it cannot be read.
    StorageError
        If it is no regular file, or has more than :data:`MOST` bytes.
    """
    _check(path, path.stat())  # before it is opened, which makes some devices do things
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor))
        content = file.read(MOST + 1)
    if len(content) > MOST:
        raise StorageError(_large(path, len(content)))
    return content


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"{path}: no plain file, though a key or a bundle's file has this name. Move it away.")
    if found.st_size > MOST:
        raise StorageError(_large(path, found.st_size))


def _large(path: Path, size: int) -> str:
    return f"{path}: {size} bytes, more than a key or a bundle's file has ({MOST}). Move it away."
