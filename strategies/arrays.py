"""Named arrays, and their description by shape and dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np

from fedcross.strategies.pool.pool import Array as Array
from fedcross.strategies.pool.pool import Arrays as Arrays

#: Name -> (shape, name of the dtype).
Spec = Mapping[str, tuple[tuple[int, ...], str]]


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return numpy's name of `dtype`, which numpy puts together anew at each call."""
    return str(dtype)


def spec_of(arrays: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype name) of `arrays`."""
    return {name: (tuple(a.shape), dtype_name(a.dtype)) for name, a in arrays.items()}


def nbytes_of(spec: Spec) -> int:
    """Return the bytes of all values of arrays of `spec`."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in spec.values())
