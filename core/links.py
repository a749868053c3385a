"""Symbolic links in the place of files that are written: followed for public files, refused for private keys."""

from __future__ import annotations

import contextlib
import os
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
        owner = place.lstat().st_uid
        if owner not in (0, os.geteuid()):
            raise StorageError(
                f"{place}: a link of user {owner}, which user {os.geteuid()} does not follow. Run as that user, or put "
                "the file itself here."
            )
        place = place.parent / place.readlink()
    raise StorageError(f"{path}: a link that leads in a circle. Put the file itself here.")


def refuse_link(private: Path) -> None:
    """Raise StorageError if a private key, or another secret, that is to be written is a link."""
    if not private.is_symlink():
        return
    there, target = True, os.path.realpath(private)
    with contextlib.suppress(PermissionError):
        there = private.exists()
    if not there:
        raise StorageError(
            f"{private}: a link to {target}, which is not there. Bring that back (is its disk mounted?), or remove the "
            "link if that is lost."
        )
    raise StorageError(f"{private}: a link to {target}, where the old key would stay. Put the key itself here first.")
