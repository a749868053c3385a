"""The inner loops of :mod:`strategies.pool.loops` for large pools, in numba.

Importing this module and the first call take about a second together, so only large pools use it. All functions release
the GIL, write only to their arguments and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcross.core.compiled_loops import Function
from fedcross.core.compiled_loops import compiled as compile_loop

CHUNK = 8192
"""Columns that are handled at a time: of 10 float32 models 320 KiB."""


def compiled(**flags: Any) -> Callable[[Function], Function]:
    """Return a decorator: :func:`core.compiled_loops.compiled` with these flags of numba."""
    return lambda function: compile_loop(function, **flags)


# The compiler may reorder sums, so that it can vectorise them; NaN and infinity keep their meaning.
@compiled(fastmath={"reassoc", "contract"})
def _products(x: NDArray[Any], y: NDArray[Any], n: int, zero: Any, out: NDArray[np.float64]) -> None:
    """Add the inner products of 2 rows `x` and 4 rows `y` of n values to `out` (4, 2)."""
    x0, x1, y0, y1, y2, y3 = x[0], x[1], y[0], y[1], y[2], y[3]
    s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
    for c in range(n):
        a, b = x0[c], x1[c]
        s00 += y0[c] * a
        s01 += y0[c] * b
        s10 += y1[c] * a
        s11 += y1[c] * b
        s20 += y2[c] * a
        s21 += y2[c] * b
        s30 += y3[c] * a
        s31 += y3[c] * b
    out[0, 0] += s00
    out[0, 1] += s01
    out[1, 0] += s10
    out[1, 1] += s11
    out[2, 0] += s20
    out[2, 1] += s21
    out[3, 0] += s30
    out[3, 1] += s31


@compiled()
def _copy(source: NDArray[Any], to: NDArray[Any]) -> None:
    for c in range(len(source)):
        to[c] = source[c]


@compiled()
def _subtract(one: NDArray[Any], other: NDArray[Any], out: NDArray[Any]) -> None:
    for c in range(len(one)):
        out[c] = one[c] - other[c]


@compiled()
def _towards(row: NDArray[Any], other: NDArray[Any], share: Any, rest: Any) -> None:
    """Interpolate from `row` to `other` by `share`, from the nearer end, so equal values and share 1 are exact."""
    if share < rest:
        for c in range(len(row)):
            row[c] += share * (other[c] - row[c])
    else:
        for c in range(len(row)):
            row[c] = other[c] - rest * (other[c] - row[c])


@compiled()
def gram(
    rows: NDArray[Any],
    members: NDArray[np.int64],
    start: int,
    stop: int,
    scratch: NDArray[Any],
    out: NDArray[np.float64],
) -> None:
    """Add the inner products of the first member and the others' differences from it, upper triangle, to `out`.

    Sums inside CHUNK columns are of the rows' dtype. `scratch` has zeros, (n, CHUNK) with n a multiple of 4 that is m
    or more; `out` is (n, n), undefined below the diagonal and beyond row or column m.
    """
    m = len(members)
    for a in range(start, stop, CHUNK):
        n = min(CHUNK, stop - a)
        first = rows[members[0], a : a + n]
        _copy(first, scratch[0])
        for i in range(1, m):
            _subtract(rows[members[i], a : a + n], first, scratch[i])
        for i in range(0, m, 2):
            for j in range(0, i + 2, 4):
                _products(scratch[i : i + 2], scratch[j : j + 4], n, scratch.dtype.type(0), out[j : j + 4, i : i + 2])


@compiled()
def mix(
    rows: NDArray[Any],
    targets: NDArray[np.int64],
    index: NDArray[np.int64],
    shares: NDArray[Any],
    start: int,
    stop: int,
    scratch: NDArray[Any],
) -> None:
    """Mix columns ``start:stop`` of the `targets` rows as :func:`strategies.pool.loops.mix` says, in place.

    `index` and `shares` (T, L) or (1, L) are sources, and the share that each has of the weights up to it (the first is
    1); `scratch` is (K, CHUNK) of the rows' dtype.
    """
    one = shares.dtype.type(1)
    for a in range(start, stop, CHUNK):
        b = min(a + CHUNK, stop)
        for k in range(len(rows)):
            _copy(rows[k, a:b], scratch[k])
        for t in range(len(targets)):
            source = t if len(index) > 1 else 0
            row = rows[targets[t], a:b]
            if index[source, 0] != targets[t]:
                _copy(scratch[index[source, 0], : b - a], row)
            for position in range(1, index.shape[1]):
                share = shares[source, position]
                _towards(row, scratch[index[source, position]], share, one - share)
