"""Arrays in other forms than records have by default: all of a record *packed* as one, and with foreign headers.

Flower sends every array as an object of its own, with two requests and a round trip. Between fedcross programs on a
network a record is one safetensors file. A receiver compares the header, given by names, shapes, dtypes, with its own.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Mapping

import numpy as np
from flwr.app import Array as FlowerArray

from fedcross.core.errors import UploadError
from fedcross.strategies.pool.pool import Array, Arrays

#: Name -> (shape, name of the dtype).
Spec = Mapping[str, tuple[tuple[int, ...], str]]
Ordered = tuple[tuple[str, tuple[int, ...], str], ...]
#: Name of the one array of a packed record, and the serialisation type that it declares to Flower.
PACKED, STYPE = "packed", "safetensors"

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
           "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip
_NAMES = {short: name for name, short in _DTYPES.items()}


def packable(spec: Spec) -> bool:
    """Return whether safetensors supports every dtype of `spec`."""
    return all(dtype in _DTYPES for _, dtype in spec.values())


def pack(arrays: Mapping[str, Array], spec: Spec) -> FlowerArray:
    """Return `arrays`, of this `spec`, as one."""
    ordered = _ordered(spec)
    values = (np.asarray(arrays[name], order="C").reshape(-1).view(np.uint8).data for name, *_ in ordered)
    data = b"".join((_header(ordered), *values))
    return FlowerArray(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def unpack(array: FlowerArray, spec: Spec | None = None) -> Arrays:
    """Return read-only views of packed arrays, which must be those of `spec`; None: of what their header declares."""
    data = array.data
    if array.dtype != "uint8":
        raise UploadError("wrong_dtype", f"packed arrays declared as {str(array.dtype)[:40]!r}")
    if not isinstance(data, bytes) or tuple(array.shape) != (len(data),):
        raise UploadError("wrong_shape", f"packed arrays declared as {str(array.shape)[:80]}")
    if spec is None:
        try:
            found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            spec = {name: (tuple(entry["shape"]), _NAMES[entry["dtype"]]) for name, entry in found.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UploadError("malformed_array", "no readable header of packed arrays") from error
    ordered = _ordered(spec)
    header = _header(ordered)
    wanted = len(header) + sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in ordered)
    if len(data) != wanted or not data.startswith(header):
        raise UploadError("malformed_array", f"{len(data)} packed bytes, not the {wanted} of the declared arrays")
    arrays, place = {}, len(header)
    for name, shape, dtype in ordered:
        arrays[name] = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=place).reshape(shape)
        place += arrays[name].nbytes
    return {name: arrays[name] for name in spec}


def _ordered(spec: Spec) -> Ordered:
    """Return (name, shape, dtype), wide numbers first so that all are aligned, then by name: safetensors' own order."""
    rows = ((name, tuple(shape), dtype) for name, (shape, dtype) in spec.items())
    return tuple(sorted(rows, key=lambda row: (-np.dtype(row[2]).itemsize, row[0])))


@functools.lru_cache(maxsize=256)
def _header(ordered: Ordered) -> bytes:
    entries, place = {}, 0
    for name, shape, dtype in ordered:
        stop = place + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def npy_header(name: str, data: bytes, shape: tuple[int, ...], dtype: str) -> tuple[int, bool]:
    """Return the offset of the values and whether they lie by columns, for a header that another program wrote."""
    head = io.BytesIO(data[:1024])
    try:
        version = np.lib.format.read_magic(head)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        found_shape, fortran, found_dtype = read(head, max_header_size=1024)
    except Exception as error:
        # numpy raises ValueError; its header parser also raises SyntaxError, TokenError and TypeError.
        raise UploadError("malformed_array", f"{name}: no readable .npy header") from error
    if found_shape != shape or found_dtype != np.dtype(dtype):
        raise UploadError("malformed_array", f"{name}: header and declaration disagree")
    return head.tell(), bool(fortran) and len(shape) > 1
