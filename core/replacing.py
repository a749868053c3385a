"""Writes files so that a crash leaves the old file or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

#: Ends the name of a file that is being written.
PART = ".part"


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Yield a new file that gets the name `path` at the end of the block, once it is on the disk.

    If the block or the write fails, nothing is left of it. Several processes may write the same file at once.
    """
    # mkstemp opens with mode 0600 under any umask.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
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
