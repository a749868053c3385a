"""Passes over a pool that are no mixing matrix, or cheaper than one: recombination, a pull to the mean, mutation.

Like those of :mod:`strategies.pool.blocks` they work in place, in column blocks that fit a core's cache, and read and
write each value of the pool once. Blocks and threads decide nothing: every value is computed on its own, and random
choices belong to entries of the ``state_dict``, never to blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedcross.strategies.pool.blocks import column_groups, over_groups
from fedcross.strategies.pool.layout import Array
from fedcross.strategies.pool.pool import Pool, whole_numbers


def recombine(pool: Pool, members: Sequence[int], sources: NDArray[np.int64]) -> None:
    """Move the entries of the members' models: member i gets entry e from the model of member ``sources[e, i]``.

    Parameters
    ----------
    pool : Pool
        Changed in place; slots that are not members keep their model.
    members : sequence of int
        The m slots that take part.
    sources : int64 array (E, m)
        One row for each entry of the ``state_dict``, in its order: positions in `members`. If every row is a
        permutation, every value stays in the pool, and the members' sum stays the same.
    """
    slots = np.asarray(members, np.int64)
    origin = slots[sources]
    for entry, order in zip(pool.layout.entries, origin, strict=True):
        if entry.is_integer:
            columns = slice(entry.start, entry.stop)
            pool.integers[slots, columns] = pool.integers[order, columns]
    pieces = _Pieces(pool)
    rows, to = torch.from_numpy(pool.rows), torch.from_numpy(slots)
    orders = [torch.from_numpy(order) for order in origin]

    def task(_number: int, blocks: list[slice]) -> None:
        scratch = rows.new_empty(len(slots) * (blocks[0].stop - blocks[0].start))
        for block in blocks:
            for which, columns in pieces.of(block):
                piece = rows[:, columns]
                taken = scratch[: len(slots) * piece.shape[1]].view(len(slots), -1)
                torch.index_select(piece, 0, orders[which], out=taken)
                piece.index_copy_(0, to, taken)

    over_groups(task, column_groups(len(pool), pool.rows.itemsize, 0, pool.rows.shape[1]))


def pull(pool: Pool, members: Sequence[int], own: float) -> None:
    """Set ``w_i = own v_i + (1 - own) M`` for all members, M their uniform mean; the matrix is ``mixing.pull``.

    The mean is summed in float64. A value that all members share stays the same to the bit; with ``own=0`` all members
    become equal. Integer entries are mixed in float64 and truncated, as :meth:`Pool.mix` does.
    """
    slots = np.asarray(members, np.int64)
    if len(slots) < 2 or own == 1:
        return
    counters = pool.integers[slots].astype(np.float64)
    pool.integers[slots] = whole_numbers(own * counters + (1 - own) * counters.mean(axis=0))
    rows, chosen = torch.from_numpy(pool.rows), torch.from_numpy(slots)
    everybody = np.array_equal(slots, np.arange(len(pool)))

    def task(_number: int, blocks: list[slice]) -> None:
        for columns in blocks:
            piece = rows[:, columns] if everybody else rows[chosen, columns]
            mean = torch.mean(piece, 0, dtype=torch.float64).to(rows.dtype)
            piece.lerp_(mean, 1 - own)
            if not everybody:
                rows[chosen, columns] = piece

    over_groups(task, column_groups(len(slots), pool.rows.itemsize, 0, pool.rows.shape[1]))


def spread(
    pool: Pool, base: Array, integers: NDArray[np.int64], step: Array, factors: NDArray[np.float64], columns: slice
) -> None:
    """Set every slot's entry e to ``base + factors[e, slot] * step``; the pool's old values do not matter.

    Parameters
    ----------
    base, step : float arrays (d,)
        Rows of the pool's layout.
    integers : int64 array (i,)
        Every slot gets these integer entries.
    factors : float64 array (E, K)
        One row for each entry of the ``state_dict``, in its order; rows of integer entries are not used.
    columns : slice
        Columns that take part, from 0; the others become those of `base`.
    """
    pool.integers[...] = integers
    rows, start, way = torch.from_numpy(pool.rows), torch.from_numpy(base), torch.from_numpy(step)
    scales = torch.from_numpy(factors.astype(pool.rows.dtype))[:, :, None]
    pieces, last = _Pieces(pool), columns.indices(pool.rows.shape[1])[1]

    def task(_number: int, blocks: list[slice]) -> None:
        for block in blocks:
            for which, part in pieces.of(block):
                if part.start < last:
                    torch.addcmul(start[part], scales[which], way[part], out=rows[:, part])
                else:
                    rows[:, part] = start[part]

    over_groups(task, column_groups(len(pool), pool.rows.itemsize, 0, pool.rows.shape[1]))


class _Pieces:
    """The columns of the float entries, for looking up which entries a block holds."""

    def __init__(self, pool: Pool) -> None:
        entries = [(e.start, e.stop, i) for i, e in enumerate(pool.layout.entries) if not e.is_integer]
        self._entries = sorted(entry for entry in entries if entry[0] < entry[1])
        self._stops = np.array([stop for _, stop, _ in self._entries])

    def of(self, block: slice) -> Iterator[tuple[int, slice]]:
        """Yield the entry's number and its columns for every entry that has columns in `block`."""
        at = int(np.searchsorted(self._stops, block.start, side="right"))
        for start, stop, which in self._entries[at:]:
            if start >= block.stop:
                return
            yield which, slice(max(start, block.start), min(stop, block.stop))
