"""The inner loops of :mod:`strategies.pool.blocks` and :mod:`strategies.pool.passes` for large pools, in numba.

Importing this module imports numba, and the first call compiles: about a second together. Only pools so large that this
does not matter use it. All functions release the GIL, write only to their arguments and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

GRAM_CHUNK = 2048
"""Columns whose products are summed in the rows' dtype before they are added in float64."""

MIX_CHUNK = 1024
"""Columns of all rows that are copied, then mixed from the copy: 40 KiB at K = 10 in float32."""

Function = TypeVar("Function", bound=Callable[..., None])


def compiled(**flags: Any) -> Callable[[Function], Function]:
    """Compile a function at its first call, without the GIL and without a cache on disk."""
    return cast(Callable[[Function], Function], numba.njit(nogil=True, **flags))


# The compiler may reorder sums, so that it can vectorise them; NaN and infinity keep their meaning.
@compiled(fastmath={"reassoc", "contract"})
def _products(
    x0: NDArray[Any],
    x1: NDArray[Any],
    y0: NDArray[Any],
    y1: NDArray[Any],
    y2: NDArray[Any],
    y3: NDArray[Any],
    zero: Any,
    out: NDArray[np.float64],
) -> None:
    """Add the eight inner products to `out` (4, 2): six values are loaded for eight multiplications."""
    s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
    for c in range(len(x0)):
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
def add_gram(
    rows: NDArray[Any], members: NDArray[np.int64], start: int, stop: int, zero: Any, out: NDArray[np.float64]
) -> None:
    """Add the inner products of the `members` rows over columns ``start:stop`` to the upper triangle of `out`.

    Parameters
    ----------
    rows : float array (K, d)
    members : int64 array (m,)
    zero : scalar of the rows' dtype
    out : float64 array, (n, n) with n a multiple of 4 and at least m
        Its values below the diagonal and beyond row or column m are undefined.
    """
    last = len(members) - 1
    for a in range(start, stop, GRAM_CHUNK):
        b = min(a + GRAM_CHUNK, stop)
        for i in range(0, last + 1, 2):
            x0, x1 = rows[members[i], a:b], rows[members[min(i + 1, last)], a:b]
            for j in range(0, i + 2, 4):
                y0, y1 = rows[members[min(j, last)], a:b], rows[members[min(j + 1, last)], a:b]
                y2, y3 = rows[members[min(j + 2, last)], a:b], rows[members[min(j + 3, last)], a:b]
                _products(x0, x1, y0, y1, y2, y3, zero, out[j : j + 4, i : i + 2])


@compiled()
def _copy(source: NDArray[Any], to: NDArray[Any]) -> None:
    for c in range(len(source)):
        to[c] = source[c]


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
def mix(
    rows: NDArray[Any],
    targets: NDArray[np.int64],
    index: NDArray[np.int64],
    shares: NDArray[Any],
    start: int,
    stop: int,
    scratch: NDArray[Any],
) -> None:
    """Mix columns ``start:stop`` of the `targets` rows as :func:`strategies.pool.blocks.mix` says.

    Parameters
    ----------
    rows : float array (K, d)
        Changed in place.
    index, shares : arrays (T, L) or (1, L) of int64 and of the rows' dtype
        Sources, and the share that each has of the weights up to it (the first is 1).
    scratch : array (K, MIX_CHUNK) of the rows' dtype
    """
    one = shares.dtype.type(1)
    for a in range(start, stop, MIX_CHUNK):
        b = min(a + MIX_CHUNK, stop)
        for k in range(len(rows)):
            _copy(rows[k, a:b], scratch[k, : b - a])
        for t in range(len(targets)):
            source = t if len(index) > 1 else 0
            row = rows[targets[t], a:b]
            if index[source, 0] != targets[t]:
                _copy(scratch[index[source, 0], : b - a], row)
            for position in range(1, index.shape[1]):
                share = shares[source, position]
                _towards(row, scratch[index[source, position], : b - a], share, one - share)


@compiled()
def move(
    rows: NDArray[Any], slots: NDArray[np.int64], order: NDArray[np.int64], start: int, stop: int, scratch: NDArray[Any]
) -> None:
    """Give columns ``start:stop`` of row ``slots[i]`` the values of row ``slots[order[i]]``, for all i at once.

    `scratch` is an array (len(slots), MIX_CHUNK) of the rows' dtype.
    """
    for a in range(start, stop, MIX_CHUNK):
        b = min(a + MIX_CHUNK, stop)
        for i in range(len(slots)):
            _copy(rows[slots[i], a:b], scratch[i, : b - a])
        for i in range(len(slots)):
            if order[i] != i:
                _copy(scratch[order[i], : b - a], rows[slots[i], a:b])


@compiled()
def _mean(
    rows: NDArray[Any], slots: NDArray[np.int64], a: int, b: int, total: NDArray[np.float64], out: NDArray[Any]
) -> None:
    """Write the mean of columns ``a:b`` of the `slots` rows, summed in float64, to the first places of `out`."""
    for c in range(b - a):
        total[c] = rows[slots[0], a + c]
    for i in range(1, len(slots)):
        row = rows[slots[i], a:b]
        for c in range(b - a):
            total[c] += row[c]
    for c in range(b - a):
        out[c] = total[c] / len(slots)


@compiled()
def mean(
    rows: NDArray[Any], slots: NDArray[np.int64], start: int, stop: int, total: NDArray[np.float64], out: NDArray[Any]
) -> None:
    """Write the mean of columns ``start:stop`` of the `slots` rows, summed in float64, to the same columns of `out`.

    `total` is scratch (MIX_CHUNK,) of float64.
    """
    for a in range(start, stop, MIX_CHUNK):
        b = min(a + MIX_CHUNK, stop)
        _mean(rows, slots, a, b, total, out[a:b])


@compiled()
def pull(
    rows: NDArray[Any],
    slots: NDArray[np.int64],
    share: Any,
    rest: Any,
    start: int,
    stop: int,
    total: NDArray[np.float64],
    mean: NDArray[Any],
) -> None:
    """Move columns ``start:stop`` of the `slots` rows by `share` towards their mean; `rest` is ``1 - share``.

    Both are scalars of the rows' dtype; `total` and `mean` are scratch (MIX_CHUNK,), float64 and of the rows' dtype.
    """
    for a in range(start, stop, MIX_CHUNK):
        b = min(a + MIX_CHUNK, stop)
        _mean(rows, slots, a, b, total, mean)
        for i in range(len(slots)):
            _towards(rows[slots[i], a:b], mean[: b - a], share, rest)


@compiled()
def follow(
    rows: NDArray[Any], share: Any, rest: Any, mean: NDArray[Any], step: NDArray[Any], push: Any, start: int, stop: int
) -> None:
    """Move columns ``start:stop`` of all rows by `share` towards `mean`, then by `push` times `step`.

    `share`, `rest` (``1 - share``) and `push` are scalars of the rows' dtype; `mean` and `step` are rows (d,).
    """
    for a in range(start, stop, MIX_CHUNK):
        b = min(a + MIX_CHUNK, stop)
        for i in range(len(rows)):
            row, way = rows[i, a:b], step[a:b]
            _towards(row, mean[a:b], share, rest)
            for c in range(len(row)):
                row[c] += push * way[c]


@compiled()
def mutate(
    rows: NDArray[Any],
    slots: NDArray[np.int64],
    mean: NDArray[Any],
    factors: NDArray[Any],
    start: int,
    stop: int,
    total: NDArray[np.float64],
    step: NDArray[Any],
) -> None:
    """Set row k to ``w + factors[k] * (w - mean)`` in columns ``start:stop``, w the mean of the `slots` rows.

    `mean` (d,) becomes w; `total` and `step` are scratch (MIX_CHUNK,), float64 and of the rows' dtype.
    """
    for a in range(start, stop, MIX_CHUNK):
        b = min(a + MIX_CHUNK, stop)
        _mean(rows, slots, a, b, total, step)
        base = mean[a:b]
        for c in range(b - a):
            new = step[c]
            step[c] = new - base[c]
            base[c] = new
        for k in range(len(rows)):
            row, factor = rows[k, a:b], factors[k]
            for c in range(b - a):
                row[c] = base[c] + factor * step[c]
