"""Converts arrays to Flower records and back, with one copy when encoding and none when decoding.

An array is sent as its ``.npy`` bytes, Flower's own convention, so any Flower client can read and write it. Between
fedcross programs all arrays of a record can be sent as one (:mod:`strategies.wire.safetensors_record`).
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from fedcross.core.errors import UploadError
from fedcross.strategies.arrays import Arrays as Arrays
from fedcross.strategies.arrays import Spec as Spec
from fedcross.strategies.arrays import dtype_name
from fedcross.strategies.arrays import nbytes_of as nbytes_of
from fedcross.strategies.arrays import spec_of as spec_of
from fedcross.strategies.wire.safetensors_record import PACKED, STYPE, declared, pack, packable, unpack

_STYPE = "numpy.ndarray"


@functools.lru_cache(maxsize=4096)
def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the .npy header that numpy writes for a C-ordered array of this shape and dtype."""
    buffer = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def encode(arrays: Mapping[str, npt.NDArray[np.generic]], packed: bool = False) -> ArrayRecord:
    """Return an ArrayRecord that owns a copy of `arrays`, `packed` as one array or each as its own."""
    if packed and arrays and packable(spec_of(dict(arrays))):
        data = pack(arrays)
        return ArrayRecord({PACKED: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)})
    record = ArrayRecord()
    for name, array in arrays.items():
        contiguous = np.asarray(array, order="C")
        values = contiguous.reshape(-1).view(np.uint8).data  # joined below: the only copy
        data = b"".join((_header(contiguous.shape, contiguous.dtype.str), values))
        record[name] = Array(dtype=dtype_name(contiguous.dtype), shape=tuple(contiguous.shape), stype=_STYPE, data=data)
    return record


def encode_like(other: ArrayRecord, arrays: Mapping[str, npt.NDArray[np.generic]]) -> ArrayRecord:
    """Return :func:`encode` of `arrays`, packed if `other` is."""
    return encode(arrays, is_packed(other))


def decode(record: ArrayRecord, spec: Spec, *, finite: bool = True) -> Arrays:
    """Return read-only views into the bytes of `record`, which must match `spec` exactly.

    An array whose values lie column by column (Fortran order) is copied, with the rows one after another.
    Nothing is allocated before names, shapes, dtypes and byte counts agree with `spec`.

    Parameters
    ----------
    record : ArrayRecord
        The received record; nothing in it is trusted.
    spec : mapping
        Name -> (shape, dtype) that is expected, no more and no less.
    finite : bool
        Whether NaN and infinities in float arrays are faults.

    Raises
    ------
    UploadError
        With reason ``missing_array``, ``extra_array``, ``wrong_dtype``, ``wrong_shape``, ``malformed_array`` or
        ``non_finite``.
    """
    if is_packed(record) and packable(spec):
        arrays = unpack(_box(record), spec)
        for name, values in arrays.items():
            _check_values(name, values, finite)
        return arrays
    if missing := [name for name in spec if name not in record]:
        raise UploadError("missing_array", f"{len(missing)} of {len(spec)} arrays missing, first {missing[0]!r}")
    if len(record) != len(spec):
        extra = next(name for name in record if name not in spec)
        raise UploadError("extra_array", f"{str(extra)[:80]!r} is not part of the model")
    return {name: _decode_one(name, record[name], shape, dtype, finite) for name, (shape, dtype) in spec.items()}


def views(record: ArrayRecord) -> Arrays:
    """Return read-only views into the bytes of `record`, which the client's own server sent.

    Raises
    ------
    UploadError
        If an array is not what its own declaration says.
    """
    if is_packed(record):
        data = _box(record)
        return unpack(data, declared(data))
    return {
        str(name): _decode_one(str(name), array, tuple(array.shape), array.dtype, finite=False)
        for name, array in record.items()
    }


def is_packed(record: ArrayRecord) -> bool:
    """Return whether all arrays of `record` are packed as one."""
    return len(record) == 1 and PACKED in record and record[PACKED].stype == STYPE


def _box(record: ArrayRecord) -> bytes:
    """Return the bytes of a packed record, which must be what its declaration says."""
    array = record[PACKED]
    if array.dtype != "uint8":
        raise UploadError("wrong_dtype", f"packed arrays declared as {str(array.dtype)[:40]!r}")
    if tuple(array.shape) != (len(array.data),):
        raise UploadError("wrong_shape", f"packed arrays declared as {str(array.shape)[:80]}")
    return array.data


def _check_values(name: str, values: npt.NDArray[np.generic], finite: bool) -> None:
    """Refuse bytes that are no boolean, and with `finite` NaN and infinities."""
    if values.dtype.kind == "b" and (values.view(np.uint8) > 1).any():  # numpy would compute with them as they are
        raise UploadError("malformed_array", f"{name} holds bytes that are no boolean")
    if finite and values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UploadError("non_finite", f"{name} holds NaN or infinity")


def _decode_one(name: str, array: Array, shape: tuple[int, ...], dtype: str, finite: bool) -> npt.NDArray[np.generic]:
    if array.dtype != dtype:
        raise UploadError("wrong_dtype", f"{name}: {str(array.dtype)[:40]!r} instead of {dtype!r}")
    if tuple(array.shape) != shape:
        raise UploadError("wrong_shape", f"{name}: {str(array.shape)[:80]} instead of {shape}")
    data = array.data
    if array.stype != _STYPE or not isinstance(data, bytes):
        raise UploadError("malformed_array", f"{name}: serialisation {str(array.stype)[:40]!r}")
    header = _header(shape, np.dtype(dtype).str)
    start, by_columns = (len(header), False) if data.startswith(header) else _parse_header(name, data, shape, dtype)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) - start != size:
        raise UploadError("malformed_array", f"{name}: {len(data) - start} bytes of values instead of {size}")
    values = np.frombuffer(data, dtype=dtype, offset=start).reshape(shape, order="F" if by_columns else "C")
    if by_columns:  # as scikit-learn's coefficients are; what computes with them wants rows
        values = np.ascontiguousarray(values)
        values.setflags(write=False)
    _check_values(name, values, finite)
    return values


def _parse_header(name: str, data: bytes, shape: tuple[int, ...], dtype: str) -> tuple[int, bool]:
    """Return the offset of the values and whether they lie by columns, for a header that another program wrote."""
    head = io.BytesIO(data[:1024])
    try:
        version = np.lib.format.read_magic(head)  # refuses another magic string
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        found_shape, fortran, found_dtype = read(head, max_header_size=1024)
    except Exception as error:
        # numpy raises ValueError, but its header parser has been seen to raise SyntaxError, TokenError and TypeError.
        raise UploadError("malformed_array", f"{name}: no readable .npy header") from error
    if found_shape != shape or found_dtype != np.dtype(dtype):
        raise UploadError("malformed_array", f"{name}: header and declaration disagree")
    return head.tell(), bool(fortran) and len(shape) > 1
