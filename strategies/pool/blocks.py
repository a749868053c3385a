"""The two passes over a pool that memory bandwidth limits, in column blocks that fit a core's cache.

A (K, d) buffer is larger than any cache, so the time of a pass depends on how often each byte is read from memory. Both
passes load a block of all K rows and some columns, finish it while it is in the cache, and continue with the next: the
Gram matrix reads each value once, mixing reads and writes each value once and needs no second pool. The blocks and
their groups do not depend on the number of threads, one thread processes one group, and the groups' sums are added in
the order of the columns. The number of threads therefore never changes a bit of the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

KERNEL_BYTES = 2**26
"""Pools of this many bytes or more use the compiled loops of :mod:`strategies.pool.kernels` instead of torch.

The loops are about twice as fast (docs/performance.md); each process compiles them once, in about a second. Their
results differ from torch's in the last bits, so the choice depends only on the pool's size.
"""

BLOCK_BYTES = 2**22
"""Bytes of one block of all rows: small enough for a core's share of L3, large enough that calls cost little.

Measured at K = 10, d = 34M: 1 MiB 3.3 times the bound of docs/performance.md, 2 MiB 3.7, 4 MiB 2.7 to 3.1, 8 MiB 3.0.
"""

GROUP = 4
"""Number of blocks in a group; a thread takes one group at a time."""


def column_groups(rows: int, itemsize: int, start: int, stop: int) -> list[list[slice]]:
    """Cut columns ``start:stop`` of a pool into blocks of about BLOCK_BYTES, 256 columns at least; group them by GROUP.

    A thread processes one group at a time.
    """
    width = max(256, BLOCK_BYTES // max(1, rows * itemsize) // 256 * 256)
    blocks = [slice(a, min(a + width, stop)) for a in range(start, stop, width)]
    return [blocks[i : i + GROUP] for i in range(0, len(blocks), GROUP)]


def over_groups(task: Callable[[int, list[slice]], None], groups: Sequence[list[slice]]) -> None:
    """Call ``task(number, blocks)`` for every group, in as many threads as torch may use (``torch.get_num_threads()``).

    Each of the threads computes with one thread of torch's.
    """
    import torch

    threads = torch.get_num_threads()
    run = map if threads == 1 else _workers(os.getpid(), threads).map
    for _ in run(task, range(len(groups)), groups):
        pass


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


def gram(rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return the inner products (m, m) of the `members` rows over `columns`.

    Products and sums inside a block (a chunk of 2048 columns in a large pool) are of the rows' dtype, sums across
    them are float64.
    """
    if rows.nbytes >= KERNEL_BYTES:
        groups = _groups_of(rows, len(members), columns)
        parts = np.zeros((len(groups), *_padded(len(members))))

        def task(number: int, blocks: list[slice]) -> None:
            for block in blocks:
                _compiled_gram(rows, members, block, parts[number])

        over_groups(task, groups)
        return _symmetric(_total(parts)[: len(members), : len(members)])
    return _symmetric(_sum_over_blocks(_block_gram, rows, members, columns))


def _groups_of(rows: NDArray[Any], members: int, columns: slice) -> list[list[slice]]:
    start, stop, _ = columns.indices(rows.shape[1])
    return column_groups(members, rows.itemsize, start, stop)


def _padded(members: int) -> tuple[int, int]:
    """Return the shape of a Gram matrix, rounded up to whole tiles of the compiled loop."""
    side = -(-members // 4) * 4
    return side, side


def _compiled_gram(rows: NDArray[Any], members: NDArray[np.int64], block: slice, total: NDArray[np.float64]) -> None:
    from fedcross.strategies.pool.kernels import add_gram

    add_gram(rows, members, block.start, block.stop, rows.dtype.type(0), total)


def manhattan(rows: NDArray[Any], members: NDArray[np.int64], columns: slice) -> NDArray[np.float64]:
    """Return ``sum |x - y|`` (m, m) of all pairs of the `members` rows over `columns`, summed as in :func:`gram`."""
    import torch

    return _sum_over_blocks(lambda block: torch.cdist(block, block, p=1.0), rows, members, columns)


def _sum_over_blocks(
    kernel: Callable[[torch.Tensor], torch.Tensor], rows: NDArray[Any], members: NDArray[np.int64], columns: slice
) -> NDArray[np.float64]:
    """Sum the results of `kernel` for each block (m, c) in float64, in the order of the columns."""
    import torch

    pool, chosen = torch.from_numpy(rows), torch.from_numpy(members)
    everybody = np.array_equal(members, np.arange(len(rows)))
    groups = _groups_of(rows, len(members), columns)
    parts = np.zeros((len(groups), len(members), len(members)))

    def task(number: int, blocks: list[slice]) -> None:
        scratch = None if everybody else _scratch(pool, len(members), blocks)
        for columns in blocks:
            block = pool[:, columns] if scratch is None else _gather(pool[:, columns], chosen, scratch)
            _accumulate(parts[number], kernel(block))

    over_groups(task, groups)
    return _total(parts)


def _scratch(pool: torch.Tensor, rows: int, blocks: list[slice]) -> torch.Tensor:
    """Return a buffer for `rows` rows of the widest of `blocks`, shared by all blocks."""
    return pool.new_empty(rows * (blocks[0].stop - blocks[0].start))


def _gather(block: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Copy the `source` rows of `block` (K, c) into `scratch`; return them as (len(source), c)."""
    import torch

    out = scratch[: len(source) * block.shape[1]].view(len(source), -1)
    return torch.index_select(block, 0, source, out=out)


def _accumulate(total: NDArray[np.float64], part: torch.Tensor) -> None:
    with np.errstate(invalid="ignore"):  # inf - inf of an overflowed model gives NaN, which is never selected
        total += part.numpy()


def _total(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add the (m, m) parts up, first to last."""
    total = np.zeros(parts.shape[1:])
    with np.errstate(invalid="ignore"):
        for part in parts:
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
    gram_columns: slice | None = None,
) -> NDArray[np.float64] | None:
    """Replace ``rows[targets[t]]`` by ``sum_l weight[t, l] * rows[index[t, l]]``, simultaneously and in place.

    The sum is computed as a chain of interpolations between two values; each step weights its model by its share of the
    weights so far. A value that all models share therefore stays exactly the same, and a weight of 1 copies exactly.

    Parameters
    ----------
    rows : float array (K, d)
        Changed in place. Rows that are no target are not written.
    targets : int64 array (T,)
        Distinct row numbers.
    index, weight : arrays (T, L) or (1, L)
        Sources and their weights, 0 or more each; every row of `weight` sums to 1 and starts above 0. A single row
        holds for all targets.
    gram_columns : slice, optional
        If given, return the Gram matrix (K, K) of the rows before mixing over these columns, which must start at 0. It
        equals :func:`gram` of all rows to the bit. It is computed while each block is in the cache, so the pool is read
        from memory once instead of twice.
    """
    if rows.nbytes >= KERNEL_BYTES:
        return _compiled_mix(rows, targets, index, weight, gram_columns)
    import torch

    pool = torch.from_numpy(rows)
    in_place = np.array_equal(targets, np.arange(len(rows))) and np.array_equal(index[:, 0], targets)
    shares = torch.from_numpy((weight / weight.cumsum(axis=1))[:, :, None].astype(rows.dtype))
    sources = [torch.from_numpy(np.ascontiguousarray(source)) for source in index.T]
    write_to = torch.from_numpy(targets)
    groups = column_groups(len(rows), rows.itemsize, 0, rows.shape[1])
    gram_stop = 0 if gram_columns is None else gram_columns.indices(rows.shape[1])[1]
    parts = np.zeros((len(groups), len(rows), len(rows)))

    def task(number: int, blocks: list[slice]) -> None:
        scratches = [_scratch(pool, len(index), blocks) for _ in sources]
        for columns in blocks:
            block = pool[:, columns]
            if columns.start < gram_stop:
                _accumulate(parts[number], _block_gram(block[:, : gram_stop - columns.start]))
            first = 1 if in_place else 0  # everything is read before anything is written
            gathered = [_gather(block, source, to) for source, to in zip(sources[first:], scratches[first:])]
            mixed = block if in_place else gathered.pop(0)
            for position, other in enumerate(gathered, start=1):
                mixed.lerp_(other, shares[:, position])
            if not in_place:
                block.index_copy_(0, write_to, mixed.expand(len(targets), -1))

    over_groups(task, groups)
    return None if gram_columns is None else _symmetric(_total(parts))


def _compiled_mix(
    rows: NDArray[Any],
    targets: NDArray[np.int64],
    index: NDArray[np.int64],
    weight: NDArray[np.float64],
    gram_columns: slice | None,
) -> NDArray[np.float64] | None:
    """Do :func:`mix` with the compiled loops."""
    from fedcross.strategies.pool.kernels import MIX_CHUNK
    from fedcross.strategies.pool.kernels import mix as mix_columns

    everybody = np.arange(len(rows))
    shares = (weight / weight.cumsum(axis=1)).astype(rows.dtype)
    index = np.ascontiguousarray(index)
    groups = column_groups(len(rows), rows.itemsize, 0, rows.shape[1])
    gram_stop = 0 if gram_columns is None else gram_columns.indices(rows.shape[1])[1]
    parts = np.zeros((len(groups), *_padded(len(rows))))

    def task(number: int, blocks: list[slice]) -> None:
        scratch = np.empty((len(rows), MIX_CHUNK), rows.dtype)
        for block in blocks:
            if block.start < gram_stop:
                _compiled_gram(rows, everybody, slice(block.start, min(block.stop, gram_stop)), parts[number])
            mix_columns(rows, targets, index, shares, block.start, block.stop, scratch)

    over_groups(task, groups)
    return None if gram_columns is None else _symmetric(_total(parts)[: len(rows), : len(rows)])


def mean(rows: NDArray[Any], members: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Write the uniform mean of the `members` rows, summed in float64, to `out` (d,)."""
    import torch

    pool, result, chosen = torch.from_numpy(rows), torch.from_numpy(out), torch.from_numpy(members)
    everybody = np.array_equal(members, np.arange(len(rows)))

    def task(_number: int, blocks: list[slice]) -> None:
        scratch = None if everybody else _scratch(pool, len(members), blocks)
        for columns in blocks:
            block = pool[:, columns] if scratch is None else _gather(pool[:, columns], chosen, scratch)
            result[columns] = torch.mean(block, 0, dtype=torch.float64)

    def compiled(_number: int, blocks: list[slice]) -> None:
        from fedcross.strategies.pool.kernels import MIX_CHUNK
        from fedcross.strategies.pool.kernels import mean as mean_of

        total = np.empty(MIX_CHUNK)
        for columns in blocks:
            mean_of(rows, members, columns.start, columns.stop, total, out)

    groups = column_groups(2 * len(members), rows.itemsize, 0, rows.shape[1])
    over_groups(compiled if rows.nbytes >= KERNEL_BYTES else task, groups)
