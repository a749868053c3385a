"""New files that get their name once they are whole and on the disk, and what is left of those that never got it."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

#: Ends the name of a file that is being written.
PART = ".part"
#: Seconds after which nobody writes such a file any more.
STALE_S = 3600.0


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Yield a new file that gets the name `path` at the end of the block, in place of a link too.

    See :func:`replacing_both`.
    """
    with replacing_both({path: mode}) as (file,):
        yield file


@contextlib.contextmanager
def replacing_both(modes: Mapping[Path, int]) -> Iterator[list[IO[bytes]]]:
    """Yield new files that get their names, those in `modes`, at the end of the block, once all are on the disk.

    If the block or one of the writes fails, nothing is left of them. Until the end they have names of their own, with
    :data:`PART` at the end, so that several processes may write the same files at once. A process that is killed leaves
    them, until :func:`tidy`. What root writes belongs to the owner of the folder (:func:`inherit`).
    """
    parts: dict[Path, Path] = {}
    try:
        with contextlib.ExitStack() as stack:
            files: list[IO[bytes]] = []
            for path in modes:
                # mkstemp opens with 0600 whatever the umask is, so a secret is never readable on its way.
                descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
                parts[path] = Path(name)
                files.append(stack.enter_context(os.fdopen(descriptor, "wb")))
            yield files
            for file, (path, mode) in zip(files, modes.items()):
                file.flush()
                inherit(file.fileno(), path.parent)
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        for path in parts:
            if len(parts) > 1 and path.is_dir():  # it would show after another one has its name
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        for path, part in parts.items():
            part.replace(path)
    except BaseException:
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # a folder that this user may not list, a file system that knows no such call
        for folder in {path.parent for path in modes}:
            sync_folder(folder)


def tidy(folder: Path) -> None:
    """Remove what processes that were killed while they wrote have left in a folder of keys, secrets among it."""
    for part in folder.glob(f".*.????????{PART}"):
        with contextlib.suppress(OSError):  # a folder that cannot be written
            if part.is_file() and time.time() - part.lstat().st_mtime > STALE_S:
                part.unlink()


def inherit(file: Path | int, folder: Path) -> None:
    """Give what root has made in `folder`, a path or a descriptor, to the owner of the folder.

    A service's user must be able to use it. Where root may not give files away (a container without that right, some
    network file systems), it stays as it is.
    """
    if os.geteuid() == 0:
        owner = folder.stat()
        with contextlib.suppress(PermissionError):
            os.chown(file, owner.st_uid, owner.st_gid, follow_symlinks=isinstance(file, int))


def sync_folder(path: Path) -> None:
    """Flush the directory entries of the folder `path` to disk (fsync)."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
