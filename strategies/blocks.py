"""The two passes over a pool that cost memory bandwidth, done in column blocks that fit a core's cache.

A pass over a (K, d) buffer touches more bytes than any cache holds, so what counts is how often each byte travels
from memory. Both passes take a block of all K rows and some columns, do everything with it while it is in the
cache, and go on: the Gram matrix reads each value once, mixing reads and writes each value once and needs no second
pool. Blocks are the same whatever the number of threads, each is worked on by one thread, and partial sums are
added in the order of the columns, so the number of threads never changes a bit of the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 2**20
"""Bytes of one block of all rows; half of a usual L2 cache, so that a block and its copy fit together."""

T = TypeVar("T")


def column_blocks(rows: int, itemsize: int, start: int, stop: int) -> list[slice]:
    """Cut columns ``start:stop`` of a pool into blocks of about BLOCK_BYTES; at least 256 columns each."""
    width = max(256, BLOCK_BYTES // max(1, rows * itemsize) // 256 * 256)
    return [slice(a, min(a + width, stop)) for a in range(start, stop, width)]


def over_blocks(task: Callable[[Iterator[slice]], T], blocks: Sequence[slice]) -> list[T]:
    """Give each thread a run of neighbouring blocks; return what `task` made of each run, in order of the columns.

    As many threads as torch may use (``torch.get_num_threads()``); each of them computes with one thread.
    """
    import torch

    threads = min(torch.get_num_threads(), len(blocks))
    if torch.get_num_threads() == 1:
        return [task(iter(blocks))]
    cuts = np.linspace(0, len(blocks), threads + 1).astype(int).tolist()
    runs = [iter(blocks[a:b]) for a, b in pairwise(cuts)]
    return list(_workers(os.getpid(), torch.get_num_threads()).map(task, runs))


@lru_cache(maxsize=4)
def _workers(_process: int, threads: int) -> ThreadPoolExecutor:
    """Threads in which torch computes on one thread each; keyed by process, as a fork does not take threads along.

    ``torch.set_num_threads`` holds for the calling thread *and* for threads that start to use torch later. So all
    workers start here, behind a barrier, and then the number of before is set again for everybody else.
    """
    import torch

    ready = Barrier(threads + 1)

    def start() -> None:
        torch.set_num_threads(1)
        ready.wait()

    executor = ThreadPoolExecutor(threads, "pool", initializer=start)
    for _ in range(threads):
        executor.submit(lambda: None)
    ready.wait()
    torch.set_num_threads(threads)
    return executor


def gram(rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return the inner products (m, m) of the `members` rows over `columns`.

    Products and sums inside a block are of the rows' dtype, sums across blocks are float64.
    """
    return _symmetric(_sum_over_blocks(_block_gram, rows, members, columns))


def manhattan(rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return ``sum |x - y|`` (m, m) of all pairs of the `members` rows over `columns`, summed as in :func:`gram`."""
    import torch

    return _sum_over_blocks(lambda block: torch.cdist(block, block, p=1.0), rows, members, columns)


def _sum_over_blocks(
    kernel: Callable[[torch.Tensor], torch.Tensor], rows: NDArray[Any], members: NDArray[np.int64], columns: slice
) -> NDArray[np.float64]:
    """Sum what `kernel` makes of each block (m, c) in float64, in the order of the columns."""
    import torch

    pool, chosen = torch.from_numpy(rows), torch.from_numpy(members)
    everybody = np.array_equal(members, np.arange(len(rows)))

    def task(blocks: Iterator[slice]) -> list[NDArray[np.float64]]:
        chosen_blocks = (pool[:, b] if everybody else pool[:, b].index_select(0, chosen) for b in blocks)
        return [kernel(block).double().numpy() for block in chosen_blocks]

    start, stop, _ = columns.indices(rows.shape[1])
    return _add(len(members), over_blocks(task, column_blocks(len(members), rows.itemsize, start, stop)))


def _add(m: int, runs: Sequence[Sequence[NDArray[np.float64]]]) -> NDArray[np.float64]:
    """Add up the (m, m) parts of all runs of blocks, in order."""
    total = np.zeros((m, m))
    with np.errstate(invalid="ignore"):  # inf - inf of a model that overflowed is a NaN, which never wins
        for run in runs:
            for part in run:
                total += part
    return total


def _symmetric(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mirror the upper triangle."""
    upper = np.triu(matrix)
    return upper + np.triu(upper, 1).T


def _block_gram(block: torch.Tensor) -> torch.Tensor:
    """Return the upper triangle of ``block @ block.T``: two products of half the rows, three quarters of the work."""
    half = len(block) // 2
    product = block.new_zeros(len(block), len(block))
    product[:half] = block[:half] @ block.T
    product[half:, half:] = block[half:] @ block[half:].T
    return product


def mix(
    rows: NDArray[Any],
    targets: NDArray[np.int64],
    index: NDArray[np.int64],
    weight: NDArray[np.float64],
    want_gram: bool = False,
) -> NDArray[np.float64] | None:
    """Replace ``rows[targets[t]]`` by ``sum_l weight[t, l] * rows[index[t, l]]``, all at once, in place.

    The sum is a chain of two-point interpolations, each with the share that its model has of the weights so far.
    So models that agree in a value keep it exactly, whatever the weights, and a weight of 1 is a copy.

    Parameters
    ----------
    rows : float array (K, d)
        Changed in place. Rows that are no target are not written.
    targets : int64 array (T,)
        Distinct row numbers.
    index, weight : arrays (T, L) or (1, L)
        Sources and their weights, 0 or more each; every row of `weight` sums to 1 and starts above 0. A single row
        holds for all targets.
    want_gram : bool
        Return the Gram matrix (K, K) of the rows as they were, to the bit what :func:`gram` gives for all of them,
        taken while each block is in the cache: the pool then travels from memory once instead of twice.
    """
    import torch

    pool = torch.from_numpy(rows)
    in_place = np.array_equal(targets, np.arange(len(rows))) and np.array_equal(index[:, 0], targets)
    shares = torch.from_numpy((weight / weight.cumsum(axis=1))[:, :, None].astype(rows.dtype))
    sources = torch.from_numpy(np.ascontiguousarray(index.T))
    write_to = torch.from_numpy(targets)

    def task(blocks: Iterator[slice]) -> list[NDArray[np.float64]]:
        grams = []
        for columns in blocks:
            block = pool[:, columns]
            if want_gram:
                grams.append(_block_gram(block).double().numpy())
            others = [block.index_select(0, source) for source in sources[1 if in_place else 0 :]]
            mixed = block if in_place else others.pop(0)
            for position, other in enumerate(others, start=1):
                mixed.lerp_(other, shares[:, position])
            if not in_place:
                block.index_copy_(0, write_to, mixed.expand(len(targets), -1))
        return grams

    parts = over_blocks(task, column_blocks(len(rows), rows.itemsize, 0, rows.shape[1]))
    return _symmetric(_add(len(rows), parts)) if want_gram else None


def mean(rows: NDArray[Any], members: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Write the uniform mean of the `members` rows, summed in float64, to `out` (d,)."""
    import torch

    pool, result, chosen = torch.from_numpy(rows), torch.from_numpy(out), torch.from_numpy(members)
    everybody = np.array_equal(members, np.arange(len(rows)))

    def task(blocks: Iterator[slice]) -> None:
        for columns in blocks:
            block = pool[:, columns] if everybody else pool[:, columns].index_select(0, chosen)
            result[columns] = torch.mean(block, 0, dtype=torch.float64)

    over_blocks(task, column_blocks(2 * len(members), rows.itemsize, 0, rows.shape[1]))
