"""Sends Flower records between two processes of one user: a JSON head over a Unix socket, arrays in shared memory.

A frame consists of eight bytes (length of the head, whether memory follows), the head and, if there are arrays, the
descriptor of a sealed memory file with their bytes one after another. Nothing is pickled, no array passes through the
socket, and the memory file has no name, so a crash leaves no file behind.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedcross.core.errors import ProtocolError

_PREFIX = struct.Struct("<II")
_PEER = struct.Struct("3i")
#: Most bytes of a head, which holds only names, shapes and scalars; a longer one is refused.
MAX_HEAD = 1 << 26
_CHUNK = 1 << 30
#: The sender can neither change nor shrink what the receiver reads.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def send(connection: socket.socket, head: dict[str, Any], content: RecordDict | None = None) -> None:
    """Send `head` (JSON values) and, if given, `content`.

    Raises
    ------
    ProtocolError
        If `content` holds bytes outside arrays, which no message of fedcross does.
    OSError
        If the other side has closed the connection.
    """
    pieces: list[bytes] = []
    described = {**head, "records": None if content is None else _describe(content, pieces)}
    try:
        data = json.dumps(described).encode()
    except TypeError as error:
        raise ProtocolError(f"a record cannot be sent to the trainer: {error}") from error
    memory = _memory(pieces) if pieces else -1
    try:
        rights = [] if memory < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
        prefix = _PREFIX.pack(len(data), len(rights))
        sent = connection.sendmsg([prefix], rights)
        connection.sendall(prefix[sent:] + data)
    finally:
        if memory >= 0:
            os.close(memory)


def receive(connection: socket.socket) -> tuple[dict[str, Any], RecordDict | None]:
    """Return the head and the content of the next frame; the arrays are copies.

    Raises
    ------
    EOFError
        If the other side is gone.
    ProtocolError
        If the frame is malformed.
    """
    first, descriptors, _, _ = socket.recv_fds(connection, _PREFIX.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        length, follows = _PREFIX.unpack(first + _exactly(connection, _PREFIX.size - len(first), first))
        if length > MAX_HEAD or follows != len(descriptors):
            raise ProtocolError("a frame between ClientApp and trainer has a wrong length. Are both of one version?")
        head = json.loads(_exactly(connection, length, b"x"))
        records = head.pop("records")
        return head, None if records is None else _content(records, descriptors[0] if descriptors else -1)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"a frame between ClientApp and trainer is malformed: {error!r}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this process's user (``SO_PEERCRED``)."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(found)
    return bool(uid == os.geteuid())


def _exactly(connection: socket.socket, size: int, before: bytes) -> bytes:
    """Return the next `size` bytes; raise EOFError at the end of the stream."""
    if not before:
        raise EOFError("the other side has closed the connection")
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("the other side has closed the connection in the middle of a frame")
        parts += part
    return bytes(parts)


def _describe(content: RecordDict, pieces: list[bytes]) -> list[Any]:
    """Return `content` as JSON values, with the bytes of arrays appended to `pieces`."""
    described: list[Any] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            entries = []
            for key, value in record.items():
                entries.append([key, value.dtype, list(value.shape), value.stype, len(value.data)])
                pieces.append(value.data)
            described.append([name, "arrays", entries])
        else:
            described.append([name, "metrics" if isinstance(record, MetricRecord) else "config", dict(record)])
    return described


def _content(records: list[Any], memory: int) -> RecordDict:
    """Return the records that :func:`_describe` described; `memory` holds the arrays."""
    content = RecordDict()
    place = 0
    size = _sealed_size(memory) if memory >= 0 else 0
    for name, kind, entries in records:
        if kind == "arrays":
            arrays: dict[str, Array] = {}
            for key, dtype, shape, stype, length in entries:
                if not 0 <= length <= size - place:
                    raise ProtocolError(f"array {key!r} lies outside of the shared memory.")
                data = _read(memory, length, place)
                arrays[key] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data)
                place += length
            content[name] = ArrayRecord(arrays)
        else:
            content[name] = MetricRecord(entries) if kind == "metrics" else ConfigRecord(entries)
    return content


def _memory(pieces: Iterable[bytes]) -> int:
    """Return the descriptor of a sealed memory file that holds `pieces` one after another."""
    memory = os.memfd_create("fedcross", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(memory, view[:_CHUNK]) :]
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _sealed_size(memory: int) -> int:
    if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ProtocolError("shared memory between ClientApp and trainer is not sealed.")
    return os.fstat(memory).st_size


def _read(memory: int, length: int, place: int) -> bytes:
    if length <= _CHUNK:
        return os.pread(memory, length, place)
    parts = [os.pread(memory, min(_CHUNK, length - at), place + at) for at in range(0, length, _CHUNK)]
    return b"".join(parts)
