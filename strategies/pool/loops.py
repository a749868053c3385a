"""The memory-bound loops over a pool: Gram matrix, in-place mixing, mean.

They work in blocks of all rows and some columns that fit a core's cache, so each value is read from memory once, and
written once by mixing. The number of threads changes no bit: blocks do not depend on it, and sums are added in their
order. Pools of `COMPILED_BYTES` or more use the two loops at the end of this file, compiled by numba: they take half of
torch's time or less, and differ from it in the last bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPILED_BYTES = 2**26
BLOCK_BYTES = 2**22
"""Bytes of one block of all rows: small enough for a core's share of L3, large enough that calls cost little."""
CHUNK = 8192
"""Columns that a compiled loop handles at a time: of 10 float32 models 320 KiB."""

Slots = NDArray[np.int64]
Matrix = NDArray[np.float64]
Products = Callable[[NDArray[Any], Slots, slice], NDArray[Any]]


def over_blocks(task: Callable[[int, slice], None], rows: int, itemsize: int, start: int, stop: int) -> int:
    """Call ``task(number, columns)`` for column blocks of about BLOCK_BYTES in threads; return their number.

    There are as many threads as torch may use, and in each torch computes with one thread.
    """
    import torch

    width = max(256, BLOCK_BYTES // max(1, rows * itemsize) // 256 * 256)
    blocks = [slice(a, min(a + width, stop)) for a in range(start, stop, width)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread, and of all that first use torch from now on
    try:
        with ThreadPoolExecutor(threads) if threads > 1 and len(blocks) > 1 else nullcontext() as pool:
            deque((pool.map if pool else map)(task, range(len(blocks)), blocks), maxlen=0)
    finally:
        torch.set_num_threads(threads)
    return len(blocks)


def summed(products: Products, rows: NDArray[Any], members: Slots, columns: slice) -> Matrix:
    """Return the sum over blocks of what `products` gives for each (m, m), in float64; its upper triangle counts."""
    start, stop, _ = columns.indices(rows.shape[1])
    parts: dict[int, NDArray[Any]] = {}

    def task(number: int, block: slice) -> None:
        parts[number] = products(rows, members, block)

    total = np.zeros((len(members), len(members)))
    for number in range(over_blocks(task, len(members), rows.itemsize, start, stop)):
        with np.errstate(invalid="ignore", over="ignore"):
            total += parts[number]
    upper = np.triu(total)
    return upper + np.triu(upper, 1).T


def gram(rows: NDArray[Any], members: Slots, columns: slice) -> Matrix:
    """Return the inner products (m, m) of the `members` rows over `columns`, accurate for narrow pools too.

    Those of a small pool are computed in float64, those of a large one on the differences d_i = w_i - c from a common
    centre c, the first member: ``<w_i, w_j> = <d_i, d_j> + <d_i, c> + <c, d_j> + <c, c>``, with a sum in float64. Each
    term is as accurate as the pool is narrow. If it is not, or not finite, the pool is treated as a small one.
    """
    if rows.nbytes >= COMPILED_BYTES:
        sums = summed(_differences, rows, members, columns)
        apart, along, square = sums.copy(), sums[0].copy(), sums[0, 0]
        apart[0], apart[:, 0], along[0] = 0, 0, 0
        with np.errstate(invalid="ignore"):
            found: Matrix = apart + along[:, None] + along[None, :] + square
        if np.isfinite(found).all() and apart.diagonal().max() <= 4 * found.diagonal().min():
            return found
    return summed(_products, rows, members, columns)


def _products(rows: NDArray[Any], members: Slots, block: slice) -> NDArray[Any]:
    import torch

    part = torch.from_numpy(rows)[torch.from_numpy(members), block].double()
    return np.asarray(part @ part.T)


def _differences(rows: NDArray[Any], members: Slots, block: slice) -> NDArray[Any]:
    """Return the products of the first member and the others' differences from it."""
    m = len(members)
    scratch, out = np.zeros((-(-m // 4) * 4, CHUNK), rows.dtype), np.zeros((m + 4, m + 4))
    _compiled()[0](rows, members, block.start, block.stop, scratch, out)
    return out[:m, :m]


def mix(rows: NDArray[Any], targets: Slots, index: NDArray[np.int64], weight: Matrix) -> None:
    """Replace ``rows[targets[t]]`` by ``sum_l weight[t, l] * rows[index[t, l]]``, simultaneously and in place.

    The sum is computed as a chain of interpolations between two values; each step weights its model by its share of the
    weights so far. A value that all models share therefore stays exactly the same, and a weight of 1 copies exactly.

    Parameters
    ----------
    rows : float array (K, d)
    targets : int64 array (T,)
        Distinct row numbers; others are not written.
    index, weight : arrays (T, L) or (1, L)
        Sources and weights; every row of `weight` sums to 1 and starts above 0. A single row holds for all targets.
    """
    import torch

    shares = (weight / weight.cumsum(axis=1)).astype(rows.dtype)
    pool, to = torch.from_numpy(rows), torch.from_numpy(targets)
    lerps = torch.from_numpy(shares[:, :, None])
    sources = [torch.from_numpy(np.ascontiguousarray(source)) for source in index.T]

    def plain(_: int, columns: slice) -> None:
        block = pool[:, columns]
        mixed, *others = [block.index_select(0, source) for source in sources]
        for position, other in enumerate(others, start=1):
            mixed.lerp_(other, lerps[:, position])
        block.index_copy_(0, to, mixed.expand(len(targets), -1))

    def fast(_: int, columns: slice) -> None:
        scratch = np.empty((len(rows), CHUNK), rows.dtype)
        _compiled()[1](rows, targets, np.ascontiguousarray(index), shares, columns.start, columns.stop, scratch)

    over_blocks(fast if rows.nbytes >= COMPILED_BYTES else plain, len(rows), rows.itemsize, 0, rows.shape[1])


def mean(rows: NDArray[Any], members: Slots, out: NDArray[Any]) -> None:
    """Write the uniform mean of the `members` rows, summed in float64, to `out` (d,)."""
    import torch

    pool, result, chosen = torch.from_numpy(rows), torch.from_numpy(out), torch.from_numpy(members)

    def task(_: int, columns: slice) -> None:
        result[columns] = torch.mean(pool[:, columns].index_select(0, chosen), 0, dtype=torch.float64)

    over_blocks(task, 2 * len(members), rows.itemsize, 0, rows.shape[1])


# ---- compiled by numba: no allocation, no GIL ------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the two loops below, compiled; numba's import and a first call take about a second together."""
    from fedcross.tasks.compiled_loops import compiled

    # The compiler may reorder sums, so that it can vectorise them; NaN and infinity keep their meaning.
    return compiled(_gram_loop, fastmath={"reassoc", "contract"}), compiled(_mix_loop)


def _gram_loop(rows: Any, members: Slots, start: int, stop: int, scratch: Any, out: Matrix) -> None:
    """Add the inner products of the first member and the others' differences from it, upper triangle, to `out`.

    Sums inside CHUNK columns are of the rows' dtype. `scratch` has zeros, (n, CHUNK) with n a multiple of 4 that is m
    or more; `out` is (n, n), undefined below the diagonal and beyond row or column m. Products of 2 rows x and 4 rows y
    are computed at once, so each value loaded is used several times.
    """
    m = len(members)
    for a in range(start, stop, CHUNK):
        n = min(CHUNK, stop - a)
        first = rows[members[0], a : a + n]
        for i in range(m):
            row, difference = rows[members[i], a : a + n], scratch[i]
            for c in range(n):
                difference[c] = row[c] - first[c] if i else first[c]
        for i in range(0, m, 2):
            x0, x1 = scratch[i], scratch[i + 1]
            for j in range(0, i + 2, 4):
                y0, y1, y2, y3 = scratch[j], scratch[j + 1], scratch[j + 2], scratch[j + 3]
                s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = scratch.dtype.type(0)
                for c in range(n):
                    s00 += y0[c] * x0[c]
                    s01 += y0[c] * x1[c]
                    s10 += y1[c] * x0[c]
                    s11 += y1[c] * x1[c]
                    s20 += y2[c] * x0[c]
                    s21 += y2[c] * x1[c]
                    s30 += y3[c] * x0[c]
                    s31 += y3[c] * x1[c]
                for k, pair in enumerate(((s00, s01), (s10, s11), (s20, s21), (s30, s31))):
                    out[j + k, i] += pair[0]
                    out[j + k, i + 1] += pair[1]


def _mix_loop(
    rows: Any, targets: Slots, index: NDArray[np.int64], shares: Any, start: int, stop: int, scratch: Any
) -> None:
    """Mix columns ``start:stop`` of the `targets` rows as :func:`mix` says; `scratch` is (K, CHUNK).

    It interpolates from the nearer end, so equal values and share 1 are exact.
    """
    one = shares.dtype.type(1)
    for a in range(start, stop, CHUNK):
        n = min(CHUNK, stop - a)
        for k in range(len(rows)):
            row, copy = rows[k, a : a + n], scratch[k]
            for c in range(n):
                copy[c] = row[c]
        for t in range(len(targets)):
            source = t if len(index) > 1 else 0
            row = rows[targets[t], a : a + n]
            own = scratch[index[source, 0]]
            if index[source, 0] != targets[t]:
                for c in range(n):
                    row[c] = own[c]
            for position in range(1, index.shape[1]):
                share, other = shares[source, position], scratch[index[source, position]]
                rest = one - share
                for c in range(n):
                    row[c] = (
                        row[c] + share * (other[c] - row[c]) if share < rest else other[c] - rest * (other[c] - row[c])
                    )
