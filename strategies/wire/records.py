"""Named arrays: their description, and their form as Flower records, with one copy to encode and none to decode.

An array is sent as its ``.npy`` bytes, Flower's own convention, so any Flower client can read and write it. Flower
sends every array as an object of its own, with two requests and a round trip. Between fedcross programs all arrays of
a record can be *packed* as one, a safetensors file. Its header follows from names, shapes and dtypes alone, so a
receiver compares it with its own and parses nothing.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict

from fedcross.core.errors import UploadError
from fedcross.strategies.pool.pool import Array as Array
from fedcross.strategies.pool.pool import Arrays as Arrays

#: Name -> (shape, name of the dtype).
Spec = Mapping[str, tuple[tuple[int, ...], str]]
#: Name of the one array of a packed record, and the serialisation types that arrays declare to Flower.
PACKED, STYPE, NUMPY = "packed", "safetensors", "numpy.ndarray"

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
           "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip
_NAMES = {short: name for name, short in _DTYPES.items()}


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype[np.generic]) -> str:
    return str(dtype)  # numpy puts it together anew at each call


def spec_of(arrays: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype name) of `arrays`."""
    return {name: (tuple(a.shape), _dtype_name(a.dtype)) for name, a in arrays.items()}


def nbytes_of(spec: Spec) -> int:
    """Return the bytes of all values of arrays of `spec`."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in spec.values())


# ---- encoding -----------------------------------------------------------------------------------------------------


def encode(arrays: Mapping[str, Array], packed: bool | ArrayRecord = False) -> ArrayRecord:
    """Return an ArrayRecord that owns a copy of `arrays`: one Flower array each, or with `packed` one for all.

    A record in place of `packed` says which by being packed itself.
    """
    if arrays and (packed if isinstance(packed, bool) else is_packed(packed)) and packable(spec := spec_of(arrays)):
        ordered = _ordered(spec)
        data = b"".join((_packed_header(ordered), *(_values(arrays[name]) for name, *_ in ordered)))
        return ArrayRecord({PACKED: FlowerArray(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)})
    record = ArrayRecord()
    for name, array in arrays.items():
        data = b"".join((_npy_header(array.shape, array.dtype.str), _values(array)))  # the only copy
        record[name] = FlowerArray(dtype=_dtype_name(array.dtype), shape=tuple(array.shape), stype=NUMPY, data=data)
    return record


def _values(array: Array) -> memoryview:
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


@functools.lru_cache(maxsize=4096)
def _npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the .npy header that numpy writes for a C-ordered array of this shape and dtype."""
    buffer = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


Ordered = tuple[tuple[str, tuple[int, ...], str], ...]


def packable(spec: Spec) -> bool:
    """Return whether safetensors supports every dtype of `spec`."""
    return all(dtype in _DTYPES for _, dtype in spec.values())


def _ordered(spec: Spec) -> Ordered:
    """Return (name, shape, dtype), wide numbers first so that all are aligned, then by name: safetensors' own order."""
    rows = ((name, tuple(shape), dtype) for name, (shape, dtype) in spec.items())
    return tuple(sorted(rows, key=lambda row: (-np.dtype(row[2]).itemsize, row[0])))


@functools.lru_cache(maxsize=256)
def _packed_header(ordered: Ordered) -> bytes:
    entries, place = {}, 0
    for name, shape, dtype in ordered:
        stop = place + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- decoding -----------------------------------------------------------------------------------------------------


def is_packed(record: ArrayRecord) -> bool:
    """Return whether all arrays of `record` are packed as one."""
    return len(record) == 1 and PACKED in record and record[PACKED].stype == STYPE


def decode(record: ArrayRecord, spec: Spec, *, finite: bool = True) -> Arrays:
    """Return read-only views into the bytes of `record`, which must match `spec` exactly; nothing in it is trusted.

    Names, shapes, dtypes and byte counts are compared before anything is allocated. An array in Fortran order is
    copied. With `finite`, NaN and infinities are faults. Reasons of an UploadError: ``missing_array``,
    ``extra_array``, ``wrong_dtype``, ``wrong_shape``, ``malformed_array``, ``non_finite``.
    """
    if is_packed(record) and packable(spec):
        arrays = _unpack(record[PACKED], spec)
    elif missing := [name for name in spec if name not in record]:
        raise UploadError("missing_array", f"{len(missing)} of {len(spec)} arrays missing, first {missing[0]!r}")
    elif len(record) != len(spec):
        extra = next(name for name in record if name not in spec)
        raise UploadError("extra_array", f"{str(extra)[:80]!r} is not part of the model")
    else:
        arrays = {name: _decode_one(name, record[name], shape, dtype) for name, (shape, dtype) in spec.items()}
    for name, values in arrays.items():
        if values.dtype.kind == "b" and (values.view(np.uint8) > 1).any():  # numpy would compute with them as they are
            raise UploadError("malformed_array", f"{name} holds bytes that are no boolean")
        if finite and values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UploadError("non_finite", f"{name} holds NaN or infinity")
    return arrays


def views(record: ArrayRecord) -> Arrays:
    """Return read-only views into the bytes of `record`, from the client's own server; an UploadError if damaged."""
    if is_packed(record):
        return _unpack(record[PACKED])
    return {str(name): _decode_one(str(name), one, tuple(one.shape), one.dtype) for name, one in record.items()}


def _unpack(array: FlowerArray, spec: Spec | None = None) -> Arrays:
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
    header = _packed_header(ordered)
    if len(data) != (wanted := len(header) + nbytes_of(spec)) or not data.startswith(header):
        raise UploadError("malformed_array", f"{len(data)} packed bytes, not the {wanted} of the declared arrays")
    found, place = {}, len(header)
    for name, shape, dtype in ordered:
        found[name] = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=place).reshape(shape)
        place += found[name].nbytes
    return {name: found[name] for name in spec}


def _decode_one(name: str, array: FlowerArray, shape: tuple[int, ...], dtype: str) -> Array:
    if array.dtype != dtype:
        raise UploadError("wrong_dtype", f"{name}: {str(array.dtype)[:40]!r} instead of {dtype!r}")
    if tuple(array.shape) != shape:
        raise UploadError("wrong_shape", f"{name}: {str(array.shape)[:80]} instead of {shape}")
    data = array.data
    if array.stype != NUMPY or not isinstance(data, bytes):
        raise UploadError("malformed_array", f"{name}: serialisation {str(array.stype)[:40]!r}")
    header = _npy_header(shape, np.dtype(dtype).str)
    start, by_columns = (len(header), False) if data.startswith(header) else _parse_header(name, data, shape, dtype)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) - start != size:
        raise UploadError("malformed_array", f"{name}: {len(data) - start} bytes of values instead of {size}")
    values = np.frombuffer(data, dtype=dtype, offset=start).reshape(shape, order="F" if by_columns else "C")
    if by_columns:  # as scikit-learn's coefficients are
        values = np.ascontiguousarray(values)
        values.setflags(write=False)
    return values


def _parse_header(name: str, data: bytes, shape: tuple[int, ...], dtype: str) -> tuple[int, bool]:
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


# ---- digests for the audit trail ----------------------------------------------------------------------------------


def digest(groups: Mapping[str, Arrays]) -> str:
    """Return the SHA-256 of groups of arrays, with names, shapes and dtypes; the same however a message is packed."""
    found = hashlib.sha256()
    for group, arrays in sorted(groups.items()):
        for name, array in sorted(arrays.items()):
            found.update(f"{group}\0{name}\0{array.dtype}\0{array.shape}\n".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def raw_digest(content: RecordDict) -> tuple[str, int]:
    """Return the SHA-256 of a message's arrays as they came, which may be malformed, and how many bytes they have."""
    found, size = hashlib.sha256(), 0
    for record, arrays in sorted(content.array_records.items()):
        for name, array in sorted(arrays.items()):
            found.update(f"{record}\0{name}\n".encode(errors="replace"))
            if isinstance(array.data, bytes):
                found.update(array.data)
                size += len(array.data)
    return found.hexdigest(), size
