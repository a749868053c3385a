"""Passes over a pool that are no mixing matrix, or cheaper than one: recombination, pulls to a mean, mutation.

Like those of :mod:`strategies.pool.blocks` they work in place, in column blocks that fit a core's cache, and read and
write each value of the pool once; pools of KERNEL_BYTES or more use compiled loops. Blocks and threads decide nothing:
every value is computed on its own, and random choices belong to entries of the ``state_dict``, never to blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedcross.strategies.pool import blocks
from fedcross.strategies.pool.layout import Array
from fedcross.strategies.pool.pool import Pool, pulled


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
    for entry, order in zip(pool.layout.entries, sources, strict=True):
        if entry.is_integer:
            columns = slice(entry.start, entry.stop)
            pool.integers[slots, columns] = pool.integers[slots[order], columns]
    pieces, rows = _Pieces(pool), pool.rows

    def plain(part: list[slice]) -> None:
        for block in part:
            for which, columns in pieces.of(block):
                rows[slots, columns] = rows[slots[sources[which]], columns]

    def compiled(part: list[slice]) -> None:
        from fedcross.strategies.pool.kernels import MIX_CHUNK, move

        scratch = np.empty((len(slots), MIX_CHUNK), rows.dtype)
        for block in part:
            for which, columns in pieces.of(block):
                move(rows, slots, sources[which], columns.start, columns.stop, scratch)

    _over(pool, compiled if _large(pool) else plain)


def pull(pool: Pool, members: Sequence[int], own: float) -> None:
    """Set ``w_i = own v_i + (1 - own) M`` for all members, M their uniform mean (GitFL's master, MultiSFL).

    The mean is summed in float64. A value that all members share stays the same to the bit; with ``own=0`` all members
    become equal. Integer entries are mixed in float64 and truncated, as :meth:`Pool.mix` does.
    """
    slots = np.asarray(members, np.int64)
    if len(slots) < 2 or own == 1:
        return
    pool.integers[slots] = pulled(pool.integers[slots], own)
    rows = pool.rows

    def plain(part: list[slice]) -> None:
        for columns in part:
            piece = torch.from_numpy(rows[slots, columns])
            piece.lerp_(torch.mean(piece, 0, dtype=torch.float64).to(piece.dtype), 1 - own)
            rows[slots, columns] = piece.numpy()

    def compiled(part: list[slice]) -> None:
        from fedcross.strategies.pool.kernels import MIX_CHUNK
        from fedcross.strategies.pool.kernels import pull as towards

        one, share = rows.dtype.type(1), rows.dtype.type(1 - own)
        total, mean = np.empty(MIX_CHUNK), np.empty(MIX_CHUNK, rows.dtype)
        for block in part:
            towards(rows, slots, share, one - share, block.start, block.stop, total, mean)

    _over(pool, compiled if _large(pool) else plain)


def follow(pool: Pool, own: float, mean: Array, step: Array, push: float) -> None:
    """Set ``w_i = own v_i + (1 - own) mean + push step`` for all slots.

    Integer entries are mixed with their own mean, as :func:`pull` does. With a `push` of 0, a value that all slots
    share with the mean stays the same to the bit.

    Parameters
    ----------
    pool : Pool
        Changed in place, all slots of it.
    own : float
        Share of a model's own values, 0 to 1.
    mean, step : float array (d,)
        Rows of the pool's layout.
    push : float
        Share of `step`, rounded to the rows' dtype.
    """
    if pool.integers.size:
        pool.integers[...] = pulled(pool.integers, own)
    rows, factor = pool.rows, pool.rows.dtype.type(push)
    target = torch.from_numpy(mean)

    def plain(part: list[slice]) -> None:
        for columns in part:
            shift = torch.from_numpy(step[columns] * factor)
            torch.from_numpy(rows[:, columns]).lerp_(target[columns], 1 - own).add_(shift)

    def compiled(part: list[slice]) -> None:
        from fedcross.strategies.pool.kernels import follow as after

        one, share = rows.dtype.type(1), rows.dtype.type(1 - own)
        for block in part:
            after(rows, share, one - share, mean, step, factor, block.start, block.stop)

    _over(pool, compiled if _large(pool) else plain)


def shrink(pool: Pool, columns: slice, share: float) -> None:
    """Multiply `columns` of all rows by ``1 - share``, rounded to the rows' dtype, in place."""
    factor = float(pool.rows.dtype.type(1 - share))

    def task(_: int, pieces: list[slice]) -> None:
        for piece in pieces:
            torch.from_numpy(pool.rows[:, piece]).mul_(factor)

    blocks.over_groups(task, blocks.column_groups(len(pool), pool.rows.itemsize, columns.start, columns.stop))


def approach(average: Array, mean: Array, share: float) -> None:
    """Move `average` (d,) by `share` of its way towards `mean` (d,), in place, in pieces that fit a core's cache."""
    here, there, part = torch.from_numpy(average), torch.from_numpy(mean), float(average.dtype.type(share))

    def task(_: int, pieces: list[slice]) -> None:
        for columns in pieces:
            way = there[columns] - here[columns]
            here[columns] += way.mul_(part)

    blocks.over_groups(task, blocks.column_groups(4, average.itemsize, 0, len(average)))


def squared_distance(one: Array, other: Array) -> float:
    """Return ``||one - other||^2`` of two arrays of the same size and float type, from one pass over both.

    Differences and their sums inside a piece are of the arrays' dtype, sums over pieces are float64; where that is too
    large for the dtype, all of it is computed once more in float64.
    """
    a, b = one.reshape(-1), other.reshape(-1)
    groups = blocks.column_groups(16, one.itemsize, 0, len(a))
    parts = np.zeros(len(groups))

    def task(number: int, pieces: list[slice]) -> None:
        scratch = np.empty(pieces[0].stop - pieces[0].start, one.dtype)
        for columns in pieces:
            way = torch.from_numpy(np.subtract(a[columns], b[columns], out=scratch[: columns.stop - columns.start]))
            parts[number] += float(torch.dot(way, way))

    blocks.over_groups(task, groups)
    if np.isfinite(found := float(parts.sum())):
        return found
    return float(np.square(np.subtract(a, b, dtype=np.float64)).sum())


def mutate(pool: Pool, members: Sequence[int], mean: Array, factors: NDArray[np.float64]) -> NDArray[np.int64]:
    """Set every slot's entry e to ``w + factors[e, slot] * (w - mean)``, w the uniform mean of the members.

    Parameters
    ----------
    pool : Pool
        Changed in place, all slots of it.
    mean : float array (d,)
        An earlier mean, a row of the pool's layout; becomes w, in place.
    factors : float64 array (E, K)
        One row for each entry of the ``state_dict``, in its order; rows of integer entries are not used, all slots get
        the integer entries of the mean.

    Returns
    -------
    int64 array (i,)
        The integer entries of w.
    """
    slots, rows, pieces = np.asarray(members, np.int64), pool.rows, _Pieces(pool)
    scales = factors.astype(rows.dtype)
    integers = pool.mean_integers(slots)
    pool.integers[...] = integers
    if not _large(pool):
        way = -mean
        blocks.mean(rows, slots, mean)
        way += mean

    def plain(part: list[slice]) -> None:
        for block in part:
            for which, columns in pieces.of(block):
                rows[:, columns] = mean[columns] + scales[which][:, None] * way[columns]

    def compiled(part: list[slice]) -> None:
        from fedcross.strategies.pool.kernels import MIX_CHUNK
        from fedcross.strategies.pool.kernels import mutate as spread

        total, step = np.empty(MIX_CHUNK), np.empty(MIX_CHUNK, rows.dtype)
        for block in part:
            for which, columns in pieces.of(block):
                spread(rows, slots, mean, scales[which], columns.start, columns.stop, total, step)

    _over(pool, compiled if _large(pool) else plain)
    return integers


def _large(pool: Pool) -> bool:
    """Return whether the compiled loops are used; the choice depends only on the pool's size."""
    return pool.rows.nbytes >= blocks.KERNEL_BYTES


def _over(pool: Pool, task: Callable[[list[slice]], None]) -> None:
    """Call `task` for every group of the pool's column blocks, in threads."""
    groups = blocks.column_groups(len(pool), pool.rows.itemsize, 0, pool.rows.shape[1])
    blocks.over_groups(lambda _, part: task(part), groups)


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
