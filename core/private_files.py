"""Reads and writes files that hold secrets, and refuses unsafe ones.

Keys are readable by their owner only (0600, in folders 0700). A key that others can read is treated as lost: the
functions here refuse to use it and say what to do, instead of repairing it silently.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from fedcross.core.errors import StorageError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def private_folder(path: Path) -> Path:
    """Create `path` as a folder only its owner can enter, or check that it is one.

    Raises
    ------
    StorageError
        If it cannot be made, is no folder, or is open to group or others.
    """
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: this folder cannot be made ({error.strerror}). Choose another one.") from error
    _check_mode(path, "700")
    return path


def check_folder(path: Path) -> Path:
    """Return `path` if it is a folder that only its owner can enter; else raise StorageError."""
    if not path.is_dir():
        raise StorageError(f"{path}: no such folder of keys. Make it with fedcross deploy.")
    _check_mode(path, "700")
    return path


def check_private(path: Path) -> Path:
    """Return `path` if it is a file that only its owner can read.

    Raises
    ------
    StorageError
        If it is missing, is no regular file, or is open to group or others.
    """
    if not path.is_file():
        raise StorageError(f"{path}: no such key file. Make it with fedcross deploy.")
    _check_mode(path, "600")
    return path


def _check_mode(path: Path, wanted: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        raise StorageError(
            f"{path}: mode {mode:o}, so others on this machine can use it. Make new keys if they may have been "
            f"read, else: chmod {wanted} {path}"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a secret atomically, with mode 0600 from the first byte on; an existing file is replaced."""
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that everybody may read (a certificate, a public key), atomically."""
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        # mkstemp opens with 0600 whatever the umask is, so the secret is never readable on its way.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}).") from error
