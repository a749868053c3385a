"""The memory-bound loops over a pool: Gram matrix, in-place mixing, mean.

They work in blocks of all rows and some columns that fit a core's cache, so each value is read from memory once, and
written once by mixing. Blocks do not depend on the number of threads and their sums are added in the order of the
columns: the number of threads never changes a bit of the result. Pools of `KERNEL_BYTES` or more use loops compiled by
numba, which are about twice as fast as torch and differ from it in the last bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

KERNEL_BYTES = 2**26
BLOCK_BYTES = 2**22
"""Bytes of one block of all rows: small enough for a core's share of L3, large enough that calls cost little."""


def over_blocks(task: Callable[[int, slice], None], rows: int, itemsize: int, start: int, stop: int) -> int:
    """Call ``task(number, columns)`` for column blocks of about BLOCK_BYTES in threads; return their number.

    There are as many threads as torch may use, and in each torch computes with one thread.
    """
    import torch

    width = max(256, BLOCK_BYTES // max(1, rows * itemsize) // 256 * 256)
    blocks = [slice(a, min(a + width, stop)) for a in range(start, stop, width)]
    threads = torch.get_num_threads()
    run = map if threads == 1 else _workers(os.getpid(), threads).map
    for _ in run(task, range(len(blocks)), blocks):
        pass
    return len(blocks)


@lru_cache(maxsize=4)
def _workers(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads in each of which torch uses one thread; one pool per process, as forks lose threads.

    ``torch.set_num_threads`` applies to the calling thread *and* to threads that first use torch later. Therefore all
    workers start here, behind a barrier, and then the previous number is restored for all other threads.
    """
    import torch

    ready = Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # without it the first operation of this thread would take over the process's number
        torch.set_num_threads(1)
        ready.wait()

    executor = ThreadPoolExecutor(threads, "pool", initializer=start)
    for _ in range(threads):
        executor.submit(lambda: None)
    ready.wait()
    torch.set_num_threads(threads)
    return executor


# ---- Gram matrix ---------------------------------------------------------------------------------------------------


def gram(rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return the inner products (m, m) of the `members` rows over `columns`, accurate for narrow pools too.

    They are computed on the differences d_i = w_i - c from a common centre c, the first member:
    ``<w_i, w_j> = <d_i, d_j> + <d_i, c> + <c, d_j> + <c, c>``. Each term is as accurate as the pool is narrow, and the
    sum is float64. If the differences are longer than the models, or not finite, the products are those of the models,
    in float64.
    """
    sums = _summed(_compiled_gram if rows.nbytes >= KERNEL_BYTES else _torch_gram, rows, members, columns)
    apart, along, square = sums.copy(), sums[0].copy(), sums[0, 0]
    apart[0], apart[:, 0], along[0] = 0, 0, 0
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = apart + along[:, None] + along[None, :] + square
    if np.isfinite(found).all() and apart.diagonal().max() <= 4 * found.diagonal().min():
        return found
    return _summed(_torch_products, rows, members, columns)


Products = Callable[[NDArray[Any], NDArray[np.int64], slice, NDArray[np.float64]], None]


def _summed(products: Products, rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return the upper triangle that `products` adds to a matrix for every block, summed in order and mirrored."""
    start, stop, _ = columns.indices(rows.shape[1])
    side = len(members)
    parts: dict[int, NDArray[np.float64]] = {}

    def task(number: int, block: slice) -> None:
        parts[number] = np.zeros((side + 4, side + 4))
        products(rows, members, block, parts[number])

    total = np.zeros((side, side))
    for number in range(over_blocks(task, len(members), rows.itemsize, start, stop)):
        with np.errstate(invalid="ignore", over="ignore"):
            total += parts[number][:side, :side]
    upper = np.triu(total)
    return upper + np.triu(upper, 1).T


def _torch_products(rows: NDArray[Any], members: NDArray[np.int64], block: slice, out: NDArray[np.float64]) -> None:
    import torch

    part = torch.from_numpy(rows)[torch.from_numpy(members), block].double()
    out[: len(part), : len(part)] = (part @ part.T).numpy()


def _torch_gram(rows: NDArray[Any], members: NDArray[np.int64], block: slice, out: NDArray[np.float64]) -> None:
    import torch

    part = torch.from_numpy(rows)[torch.from_numpy(members), block].double()
    part[1:] -= part[0]
    out[: len(part), : len(part)] = (part @ part.T).numpy()


def _compiled_gram(rows: NDArray[Any], members: NDArray[np.int64], block: slice, out: NDArray[np.float64]) -> None:
    from fedcross.strategies.pool import kernels

    scratch = np.zeros((-(-len(members) // 4) * 4, kernels.CHUNK), rows.dtype)
    kernels.gram(rows, members, block.start, block.stop, scratch, out)


def manhattan(rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return ``sum |x - y|`` (m, m) of all pairs of the `members` rows over `columns`.

    Sums inside a block are of the rows' dtype, sums across blocks float64.
    """
    import torch

    pool, chosen = torch.from_numpy(rows), torch.from_numpy(members)
    parts: dict[int, NDArray[Any]] = {}

    def task(number: int, block: slice) -> None:
        part = pool[chosen, block]
        parts[number] = torch.cdist(part, part, p=1.0).numpy()

    start, stop, _ = columns.indices(rows.shape[1])
    total = np.zeros((len(members), len(members)))
    for number in range(over_blocks(task, len(members), rows.itemsize, start, stop)):
        with np.errstate(invalid="ignore"):
            total += parts[number]
    upper = np.triu(total)
    return upper + np.triu(upper, 1).T


# ---- mixing and mean -----------------------------------------------------------------------------------------------


def mix(rows: NDArray[Any], targets: NDArray[np.int64], index: NDArray[np.int64], weight: NDArray[np.float64]) -> None:
    """Replace ``rows[targets[t]]`` by ``sum_l weight[t, l] * rows[index[t, l]]``, simultaneously and in place.

    The sum is computed as a chain of interpolations between two values; each step weights its model by its share of the
    weights so far. A value that all models share therefore stays exactly the same, and a weight of 1 copies exactly.

    Parameters
    ----------
    rows : float array (K, d)
        Rows that are no target are not written.
    targets : int64 array (T,)
        Distinct row numbers.
    index, weight : arrays (T, L) or (1, L)
        Sources and their weights; every row of `weight` sums to 1 and starts above 0. A single row holds for all
        targets.
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
        from fedcross.strategies.pool import kernels

        scratch = np.empty((len(rows), kernels.CHUNK), rows.dtype)
        kernels.mix(rows, targets, np.ascontiguousarray(index), shares, columns.start, columns.stop, scratch)

    over_blocks(fast if rows.nbytes >= KERNEL_BYTES else plain, len(rows), rows.itemsize, 0, rows.shape[1])


def mean(rows: NDArray[Any], members: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Write the uniform mean of the `members` rows, summed in float64, to `out` (d,)."""
    import torch

    pool, result, chosen = torch.from_numpy(rows), torch.from_numpy(out), torch.from_numpy(members)
    everybody = np.array_equal(members, np.arange(len(rows)))

    def task(_: int, columns: slice) -> None:
        block = pool[:, columns] if everybody else pool[:, columns].index_select(0, chosen)
        result[columns] = torch.mean(block, 0, dtype=torch.float64)

    over_blocks(task, 2 * len(members), rows.itemsize, 0, rows.shape[1])
