"""Decode a data set once, then map it: a folder of ``.npy`` files that every process on the machine shares.

The folder is ``$FEDCROSS_CACHE``, else ``$XDG_CACHE_HOME/fedcross``, else ``~/.cache/fedcross``. An entry is keyed by
the path, size and modification time of every source file and by the settings that change the arrays. It appears by one
rename. If the folder cannot be written, the arrays stay in memory and a warning says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
#: Raise it when decoding changes, so that old entries are not read.
FORMAT = 4


def cached(name: str, sources: Iterable[Path], settings: Mapping[str, Any], decode: Callable[[Path], Arrays]) -> Arrays:
    """Return the arrays that `decode` makes from the files `sources`, memory-mapped from an earlier call if possible.

    `name` begins the entry's folder name; `settings` are JSON-able values that change the arrays. `decode` gets a
    folder, where it may write large arrays as ``NAME.npy``, and returns all others.
    """
    digest = hashlib.blake2b(digest_size=10)
    digest.update(json.dumps([FORMAT, settings], sort_keys=True, default=str).encode())
    for path in sources:
        status = path.stat()
        digest.update(b"\n%b\t%d\t%d" % (os.fsencode(path.resolve()), status.st_size, status.st_mtime_ns))
    try:
        return _mapped(_folder() / f"{name}-{digest.hexdigest()}", decode)
    except (OSError, RuntimeError) as error:  # Path.home: a container's user that is only a number
        logger.warning("cache cannot be written (%s): the data stay in memory", error)
        with TemporaryDirectory() as scratch:
            _write(Path(scratch), decode)
            arrays = _read(Path(scratch), None)
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


def _folder() -> Path:
    if configured := os.environ.get("FEDCROSS_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcross"


def _mapped(entry: Path, decode: Callable[[Path], Arrays]) -> Arrays:
    """Map `entry`; of several processes that start together one decodes and the others wait."""
    from filelock import FileLock

    partial = entry.with_name(f".{entry.name}")
    if not entry.is_dir():
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{partial}.lock"):
            try:
                if not entry.is_dir():
                    logger.info("decoding into %s (once)", entry)
                    _write(partial, decode)
                    partial.rename(entry)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return _read(entry, "r")


def _write(folder: Path, decode: Callable[[Path], Arrays]) -> None:
    folder.mkdir(exist_ok=True)
    for name, array in decode(folder).items():
        np.save(folder / f"{name}.npy", array)


def _read(folder: Path, mode: Any) -> Arrays:
    return {file.stem: np.load(file, mmap_mode=mode) for file in folder.glob("*.npy")}
