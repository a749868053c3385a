"""Passes Flower messages between processes of one machine: arrays in shared memory, the rest through a pipe.

An arena is a memory file that two processes map. The sender copies the bytes of each array into it and sends a small
pickle with their positions; the receiver copies them out. No array passes through a pipe. On Linux, the file has no
name, so nothing is left behind when a process dies; elsewhere it is a temporary file.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
from typing import Any

from flwr.app import Array

_PAGE = 1 << 20


class Arena:
    """A growing piece of shared memory.

    Parameters
    ----------
    path : str, optional
        The path of another process's arena. If not given, a new arena is made.

    Attributes
    ----------
    path : str
        Path under which another process of this user can open the arena while this process runs.
    """

    def __init__(self, path: str | None = None) -> None:
        self._file: Any
        if path is not None:
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115, PTH123 - lives as long as the arena
            self.path = path
        elif sys.platform == "linux":
            # A memory file is limited only by the memory; in containers, /dev/shm is often limited to 64 MB.
            self._file = os.fdopen(os.memfd_create("fedcross"), "r+b", buffering=0)
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="fedcross-", buffering=0)  # noqa: SIM115
            self.path = self._file.name
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Release the memory."""
        if self._map is not None:
            self._map.close()
        self._file.close()

    def view(self, size: int) -> memoryview:
        """Return the first `size` bytes; enlarge the arena if it is shorter."""
        size = max(size, 1)  # an empty file cannot be mapped
        if self._map is None or len(self._map) < size:
            length = os.fstat(self._file.fileno()).st_size
            if length < size:
                length = -(-size // _PAGE) * _PAGE
                os.truncate(self._file.fileno(), length)
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._file.fileno(), length)
        return memoryview(self._map)


def pack(thing: Any, arena: Arena) -> bytes:
    """Put the arrays of `thing` (messages, contexts) into `arena` and return the rest as bytes."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(thing)
    with arena.view(pickler.size) as view:
        start = 0
        for data in pickler.pieces:
            view[start : start + len(data)] = data
            start += len(data)
    return stream.getvalue()


def unpack(data: bytes, arena: Arena) -> Any:
    """Return a copy of the object that :func:`pack` packed; the copy owns its arrays."""
    return _Unpickler(io.BytesIO(data), arena).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.pieces: list[bytes] = []
        self.size = 0

    def persistent_id(self, thing: Any) -> Any:
        if type(thing) is not Array:
            return None
        place = (thing.dtype, tuple(thing.shape), thing.stype, self.size, len(thing.data))
        self.pieces.append(thing.data)
        self.size += len(thing.data)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, arena: Arena) -> None:
        super().__init__(stream)
        self._arena = arena

    def persistent_load(self, place: Any) -> Array:
        dtype, shape, stype, start, length = place
        with self._arena.view(start + length) as view:
            return Array(dtype=dtype, shape=shape, stype=stype, data=bytes(view[start : start + length]))
