"""Decode a data set once, then map it: a folder of ``.npy`` files that every process on the machine shares.

The folder is ``$FEDCROSS_CACHE``, else ``$XDG_CACHE_HOME/fedcross``, else ``~/.cache/fedcross``. An entry is keyed by
the path, size and modification time of every source file and by the settings that change the decoded arrays, so a
changed file or setting is decoded again. Entries appear by one rename: a reader never sees half of one. If the folder
cannot be written, the arrays stay in this process's memory and a log line says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcross.core.errors import DataError

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

FORMAT = 1
"""Raise it when decoding changes, so that old entries are not read."""


class _CannotWriteError(Exception):
    """The cache folder cannot be written: read-only, full, or missing."""


class Store:
    """Where a decoder puts its arrays: files under a folder, or memory if there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.arrays: Arrays = {}

    def new(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a writable array to fill; on disk its space is reserved first, so a full disk is an error here."""
        if self._folder is None or 0 in shape:
            self.arrays[name] = np.zeros(shape, dtype)
        else:
            try:
                self.arrays[name] = _reserved(self._folder / f"{name}.npy", shape, np.dtype(dtype))
            except OSError as error:
                raise _CannotWriteError(str(error)) from error
        return self.arrays[name]

    def put(self, name: str, array: Array) -> None:
        """Store a finished array."""
        self.new(name, array.shape, array.dtype)[...] = array

    def finish(self) -> None:
        """Flush what was written to disk."""
        try:
            for name, array in self.arrays.items():
                if isinstance(array, np.memmap):
                    array.flush()
                elif self._folder is not None:
                    np.save(self._folder / f"{name}.npy", array)
        except OSError as error:
            raise _CannotWriteError(str(error)) from error


def _reserved(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    array: Array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a sparse file on a full disk would end the process with SIGBUS later
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def cache_folder() -> Path | None:
    """Return the folder of all cache entries (it may not exist yet); None for a user without a home."""
    if configured := os.environ.get("FEDCROSS_CACHE"):
        return Path(configured)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "fedcross"
    try:
        return Path.home() / ".cache" / "fedcross"
    except RuntimeError:  # a container's user that is only a number
        return None


def cached(name: str, sources: Iterable[Path], settings: Mapping[str, Any], decode: Callable[[Store], None]) -> Arrays:
    """Return the arrays that `decode` makes from `sources`, memory-mapped from an earlier call where possible.

    Parameters
    ----------
    name : str
        Human-readable start of the entry's folder name.
    sources : iterable of Path
        Every file that `decode` reads; all must exist.
    settings : mapping
        JSON-able values that change the decoded arrays.
    decode : callable
        Fills the given :class:`Store`; it is called at most twice (again if the disk refuses half-way).

    Returns
    -------
    dict of str to ndarray
        Read-only memory maps; arrays in memory where the cache folder cannot be written.
    """
    folder = cache_folder()
    try:
        if folder is None:
            raise _CannotWriteError("no home folder; set FEDCROSS_CACHE")
        entry = folder / f"{name}-{_fingerprint(sources, settings)}"
        known = _open(entry)
        return _decode_to(entry, decode) if known is None else known
    except _CannotWriteError as error:
        logger.warning("cache %s cannot be written (%s): the data stay in memory", folder, error)
        store = Store(None)
        decode(store)
        for array in store.arrays.values():
            array.flags.writeable = False
        return store.arrays


def _decode_to(entry: Path, decode: Callable[[Store], None]) -> Arrays:
    from filelock import FileLock

    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(entry.with_name(f".{entry.name}.lock"))
        lock.acquire()
    except OSError as error:
        raise _CannotWriteError(str(error)) from error
    try:  # one process decodes, the others that started with it wait and then map
        known = _open(entry)
        if known is not None:
            return known
        partial = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
        try:
            _fill(partial, entry, decode)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return _open(entry) or _missing(entry)
    finally:
        lock.release()


def _fill(partial: Path, entry: Path, decode: Callable[[Store], None]) -> None:
    try:
        partial.mkdir()
    except OSError as error:
        raise _CannotWriteError(str(error)) from error
    logger.info("decoding into %s (once)", entry)
    store = Store(partial)
    decode(store)
    store.finish()
    manifest = {key: [list(a.shape), a.dtype.str] for key, a in store.arrays.items()}
    store.arrays.clear()
    try:
        (partial / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(entry, ignore_errors=True)  # only a damaged entry is ever here
        partial.rename(entry)
    except OSError as error:
        raise _CannotWriteError(str(error)) from error


def _missing(entry: Path) -> Arrays:
    raise DataError(f"{entry}: the cache entry vanished while it was written. Start again, or set FEDCROSS_CACHE.")


def _open(entry: Path) -> Arrays | None:
    """Map an entry; None if it is absent or not what its manifest says."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text())
        arrays: Arrays = {}
        for key, (shape, dtype) in manifest.items():
            empty = 0 in shape  # nothing to map
            arrays[key] = np.load(entry / f"{key}.npy", mmap_mode=None if empty else "r", allow_pickle=False)
            if list(arrays[key].shape) != shape or arrays[key].dtype.str != dtype:
                logger.warning("cache entry %s: %s is not %s %s: decoding again", entry, key, dtype, shape)
                return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("cache entry %s is damaged (%s): decoding again", entry, error)
        return None
    return arrays


def _fingerprint(sources: Iterable[Path], settings: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=10)
    digest.update(json.dumps([FORMAT, settings], sort_keys=True, default=str).encode())
    for path in sources:
        status = path.stat()
        # A name need not be UTF-8: its bytes count.
        digest.update(b"\n%b\t%d\t%d" % (os.fsencode(path.resolve()), status.st_size, status.st_mtime_ns))
    return digest.hexdigest()
