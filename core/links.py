"""Symbolic links in the place of files that are written: followed for public files, refused for private keys.

The device's user owns the folders of its keys, and root writes there too. So no link of another user is followed, in
the place of a file (:func:`followed`) nor of a folder on the way to it (:func:`resolved`).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from fedcross.core.errors import StorageError

#: Links after which a chain of them is taken for a circle.
MOST = 40


def followed(path: Path) -> Path:
    """Return where a file that is no key is to be written: what the link at `path` leads to, or `path` if it is none.

    An operator links such a file to where a program reads it. A link of another user, but root's, is not followed: it
    could lead what root writes to any file.

    Raises
    ------
    StorageError
        If it is another user's link, the folder that it leads to is not there, or the links lead in a circle.
    """
    place = path
    for _ in range(MOST):
        if not place.is_symlink():
            if place != path and not place.parent.is_dir():
                raise StorageError(f"{path}: a link to {place}, whose folder is not there. Is its disk mounted?")
            return place
        _refuse_foreign(place, "file")
        place = place.parent / place.readlink()
    raise StorageError(f"{path}: a link that leads in a circle. Put the file itself here.")


def resolved(folder: Path) -> Path:
    """Return the absolute path of `folder` without links; none of another user, but root's, is followed on the way.

    Raises
    ------
    StorageError
        If a link of another user is on the way, or the links lead in a circle.
    """
    place, links = Path("/"), 0
    rest = deque(folder.absolute().parts[1:])
    while rest:
        part = rest.popleft()
        if part == "..":
            place = place.parent
        elif _is_link(step := place / part):
            _refuse_foreign(step, "folder")
            links += 1
            if links > MOST:
                raise StorageError(f"{folder}: a link that leads in a circle. Put the folder itself there.")
            target = step.readlink()
            rest.extendleft(reversed(target.parts[target.is_absolute() :]))
            place = Path("/") if target.is_absolute() else place
        else:
            place = step
    return place


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """Yield a path that leads to `folder` whatever its user puts in its place meanwhile; messages name `folder`.

    Where the system has no ``/proc`` (no Linux), it is `folder` itself.

    Parameters
    ----------
    folder : Path
        An absolute path without links, as :func:`resolved` returns it.

    Raises
    ------
    StorageError
        If it is no folder, or another one is in its place already.
    """
    moved = f"{folder}: another folder or a link is in its place since this call began. Who moved it? Then try again."
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(moved) from error
    try:
        place = Path(f"/proc/self/fd/{descriptor}")
        if not place.exists():
            yield folder
        elif place.readlink() != folder:
            raise StorageError(moved)
        else:
            yield place
    except StorageError as error:
        raise StorageError(str(error).replace(f"/proc/self/fd/{descriptor}", str(folder))) from error
    finally:
        os.close(descriptor)


def _is_link(path: Path) -> bool:
    with contextlib.suppress(PermissionError):  # below a folder of somebody else
        return path.is_symlink()
    return False


def _refuse_foreign(link: Path, kind: str) -> None:
    """Raise StorageError if a link to a file or folder is another user's, but not root's."""
    owner = link.lstat().st_uid
    if owner not in (0, os.geteuid()):
        raise StorageError(
            f"{link}: a link of user {owner}, which user {os.geteuid()} does not follow. Run as that user, or put the "
            f"{kind} itself here."
        )


def dangling(path: Path) -> str:
    """Return, of a link that leads to nothing, that it does, with its path in front; "" of anything else."""
    with contextlib.suppress(PermissionError):
        if path.is_symlink() and not path.exists():
            return f"{path}: a link to {os.path.realpath(path)}, which is not there."
    return ""


def refuse_link(private: Path) -> None:
    """Raise StorageError if a private key, or another secret, that is to be written is a link."""
    if said := dangling(private):
        raise StorageError(f"{said} Bring that back (is its disk mounted?), or remove the link if that is lost.")
    if private.is_symlink():
        target = os.path.realpath(private)
        raise StorageError(
            f"{private}: a link to {target}, where the old key would stay. Put the key itself here first."
        )
