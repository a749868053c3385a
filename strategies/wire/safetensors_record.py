"""Packs all arrays of a record into one, in the safetensors format, because Flower sends each array separately.

Flower sends every array as an object of its own, with two requests of about 0.9 kB and a round trip. LeNet-5 has ten
arrays; packed, it is one object. Any program that reads safetensors can read it. The order of the arrays and the header
depend only on names, shapes and dtypes, so a receiver that knows what to expect compares the header with its own and
parses nothing.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import UploadError
from fedcross.strategies.arrays import Spec

#: Name of the one array of a packed record, and the serialisation type that it declares to Flower.
PACKED = "packed"
STYPE = "safetensors"

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {short: name for name, short in _DTYPES.items()}


def packable(spec: Spec) -> bool:
    """Return whether the format supports every dtype of `spec`."""
    return all(dtype in _DTYPES for _, dtype in spec.values())


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return `arrays` as the bytes of a safetensors file; one copy."""
    spec = {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
    ordered = _ordered(spec)
    values = (np.asarray(arrays[name], order="C").reshape(-1).view(np.uint8).data for name, *_ in ordered)
    return b"".join((_header(ordered), *values))


def unpack(data: bytes, spec: Spec) -> dict[str, NDArray[Any]]:
    """Return read-only views into `data`, in the order of `spec`.

    Raises
    ------
    UploadError
        ``malformed_array``: the header or the length is not the one that follows from `spec`.
    """
    ordered = _ordered(spec)
    header = _header(ordered)
    size = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in ordered)
    if not isinstance(data, bytes):
        raise UploadError("malformed_array", f"packed arrays are {type(data).__name__}, not bytes")
    if len(data) != len(header) + size:
        raise UploadError("malformed_array", f"{len(data)} packed bytes instead of {len(header) + size}")
    if not data.startswith(header):
        raise UploadError("malformed_array", "the packed header is not that of the declared arrays")
    views, place = {}, len(header)
    for name, shape, dtype in ordered:
        count = math.prod(shape)
        views[name] = np.frombuffer(data, dtype=dtype, count=count, offset=place).reshape(shape)
        place += views[name].nbytes
    return {name: views[name] for name in spec}


def declared(data: bytes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) as the header of `data`, which comes from the client's own server, declares it.

    Raises
    ------
    UploadError
        ``malformed_array``: no readable header.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        return {name: (tuple(entry["shape"]), _NAMES[entry["dtype"]]) for name, entry in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UploadError("malformed_array", "no readable header of packed arrays") from error


Ordered = tuple[tuple[str, tuple[int, ...], str], ...]


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
