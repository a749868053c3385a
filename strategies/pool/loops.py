"""The memory-bound loops over a pool: Gram matrix, in-place mixing, mean.

They work in blocks of all rows and some columns that fit a core's cache, so each value is read from memory once, and
written once by mixing. The number of threads changes no bit: blocks do not depend on it, and sums are added in their
order. Pools of `COMPILED_BYTES` or more use the two loops at the end of this file, compiled by numba: they take half of
torch's time or less, and differ from it in the last bits.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

COMPILED_BYTES = 2**26
BLOCK_BYTES = 2**22
"""Bytes of one block of all rows: small enough for a core's share of L3, large enough that calls cost little."""
CHUNK = 8192
"""Columns that a compiled loop handles at a time: of 10 float32 models 320 KiB."""

Slots = NDArray[np.int64]
Matrix = NDArray[np.float64]
R = TypeVar("R")


def over_blocks(task: Callable[[slice], R], rows: int, itemsize: int, columns: slice) -> list[R]:
    """Return ``task(block)`` of all blocks of `columns`, about BLOCK_BYTES each, computed in threads.

    There are as many threads as torch may use, and in each torch computes with one thread.
    """
    import torch

    width, threads = max(256, BLOCK_BYTES // max(1, rows * itemsize) // 256 * 256), torch.get_num_threads()
    blocks = [slice(a, min(a + width, columns.stop)) for a in range(columns.start, columns.stop, width)]
    torch.set_num_threads(1)  # of this thread, and of all that first use torch from now on
    try:
        if threads == 1 or len(blocks) == 1:
            return list(map(task, blocks))
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(task, blocks))
    finally:
        torch.set_num_threads(threads)


def summed(products: Callable[[Any, Slots, slice], NDArray[Any]], rows: Any, members: Slots, columns: slice) -> Matrix:
    """Return the sum over blocks of what `products` gives for each (m, m), in float64; its upper triangle counts."""
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = over_blocks(lambda block: products(rows, members, block), len(members), rows.itemsize, columns)
        upper = np.triu(sum(blocks, np.zeros((len(members), len(members)))))
    return upper + np.triu(upper, 1).T


def gram(rows: NDArray[Any], members: Slots, columns: slice) -> Matrix:
    """Return the inner products (m, m) of the `members` rows over `columns`, accurate for narrow pools too.

    Those of a small pool are computed in float64, those of a large one on the differences d_i = w_i - c from the first
    member c: ``<w_i, w_j> = <d_i, d_j> + <d_i, c> + <c, d_j> + <c, c>``, with a sum in float64, each term as accurate
    as the pool is narrow. A pool that is not narrow, or not finite, is treated as a small one.
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


def mix(rows: NDArray[Any], mixing: Matrix) -> None:
    """Replace the models `rows` (K, d) by ``mixing @ rows``, in place; rows that keep their model are not written.

    `mixing` is row-stochastic (K, K). The sum is a chain of interpolations between two values; each step weights its
    model by its share of the weights so far. A value that all models share therefore stays exactly the same, and a
    weight of 1 copies exactly.
    """
    import torch

    targets, index, weight = sources(mixing)
    shares = (weight / weight.cumsum(axis=1)).astype(rows.dtype)
    pool, to, lerps, *orders = map(torch.from_numpy, (rows, targets, shares[:, :, None], *index.T.copy()))

    def plain(columns: slice) -> None:
        mixed, *others = [pool[:, columns].index_select(0, order) for order in orders]
        for position, other in enumerate(others, start=1):
            mixed.lerp_(other, lerps[:, position])
        pool[:, columns].index_copy_(0, to, mixed.expand(len(targets), -1))

    def fast(columns: slice) -> None:
        scratch = np.empty((len(rows), CHUNK), rows.dtype)
        _compiled()[1](rows, targets, index, shares, columns.start, columns.stop, scratch)

    if len(targets):
        loop = fast if rows.nbytes >= COMPILED_BYTES else plain
        over_blocks(loop, len(rows), rows.itemsize, slice(0, rows.shape[1]))


def sources(mixing: Matrix) -> tuple[Slots, Slots, Matrix]:
    """Return the T rows of `mixing` that change their model, and their sources and weights (T, L), padded with 0.

    A row's own model comes first, the others follow by number. If all T rows are equal, they are one (1, L) by number.
    """
    targets = np.flatnonzero((mixing != np.eye(len(mixing))).any(axis=1))
    rows, own = mixing[targets], targets[:, None] == np.arange(len(mixing))
    if len(rows) > 1 and (rows == rows[0]).all():
        rows, own = rows[:1], np.zeros_like(own[:1])
    length = int(np.count_nonzero(rows, axis=1).max(initial=0))
    index = np.argsort(np.where(rows > 0, ~own, 2), axis=1, kind="stable")[:, :length]
    weight = np.take_along_axis(rows, index, axis=1)
    return targets, np.where(weight > 0, index, index[:, :1]), weight


def mean(rows: NDArray[Any], members: Slots, out: NDArray[Any]) -> None:
    """Write the uniform mean of the `members` rows, summed in float64, to `out` (d,)."""
    import torch

    pool, result, chosen = torch.from_numpy(rows), torch.from_numpy(out), torch.from_numpy(members)

    def task(columns: slice) -> None:
        result[columns] = torch.mean(pool[:, columns].index_select(0, chosen), 0, dtype=torch.float64)

    over_blocks(task, 2 * len(members), rows.itemsize, slice(0, rows.shape[1]))


def pull(rows: NDArray[Any], slots: Slots, own: float, goal: NDArray[Any], shift: Any, columns: slice) -> None:
    """Set ``v = own v + (1 - own) goal + shift`` for the rows v of `slots` over `columns`; `goal`, `shift`: (d,)."""
    import torch

    pool, chosen, target = map(torch.from_numpy, (rows, slots, goal))

    def task(block: slice) -> None:
        part = pool[chosen, block].lerp_(target[block], 1 - own)
        pool[chosen, block] = part if shift is None else part.add_(torch.from_numpy(shift[block]))

    over_blocks(task, len(slots), rows.itemsize, columns)


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
            scratch[k, :n] = rows[k, a : a + n]
        for t in range(len(targets)):
            source = t if len(index) > 1 else 0
            row = rows[targets[t], a : a + n]
            own = scratch[index[source, 0]]
            if index[source, 0] != targets[t]:
                row[:] = own[:n]
            for position in range(1, index.shape[1]):
                share, other = shares[source, position], scratch[index[source, position]]
                rest = one - share
                for c in range(n):
                    row[c] = (
                        row[c] + share * (other[c] - row[c]) if share < rest else other[c] - rest * (other[c] - row[c])
                    )
