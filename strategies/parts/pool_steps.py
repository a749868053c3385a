"""Steps of all models of a pool at once, in place."""

from __future__ import annotations

import numpy as np
import torch

from fedcross.strategies.pool import loops
from fedcross.strategies.pool.pool import Array, Pool, pulled


def follow(pool: Pool, own: float, mean: Array, step: Array, push: float) -> None:
    """Set ``w_i = own v_i + (1 - own) mean + push step`` for all slots; `mean` and `step` are rows (d,).

    Integer entries are pulled to their own mean. A `push` of 0 keeps a value that all slots share with the mean.
    """
    pool.integers[...] = pulled(pool.integers, own)
    rows, target, factor = torch.from_numpy(pool.rows), torch.from_numpy(mean), pool.rows.dtype.type(push)

    def task(_: int, columns: slice) -> None:
        rows[:, columns].lerp_(target[columns], 1 - own).add_(torch.from_numpy(step[columns] * factor))

    loops.over_blocks(task, len(pool), pool.rows.itemsize, 0, pool.rows.shape[1])


def shrink(pool: Pool, columns: slice, share: float) -> None:
    """Multiply `columns` of all rows by ``1 - share``, rounded to the rows' dtype, in place."""
    rows, factor = torch.from_numpy(pool.rows), float(pool.rows.dtype.type(1 - share))

    def task(_: int, piece: slice) -> None:
        rows[:, piece].mul_(factor)

    loops.over_blocks(task, len(pool), pool.rows.itemsize, columns.start, columns.stop)


def approach(average: Array, mean: Array, share: float) -> None:
    """Move `average` (d,) by `share` of its way towards `mean` (d,), in place."""
    here, there, part = torch.from_numpy(average), torch.from_numpy(mean), float(average.dtype.type(share))
    here.add_((there - here).mul_(part))


def squared_distance(one: Array, other: Array) -> float:
    """Return ``||one - other||^2``; in float64 where it is too large for the arrays' dtype."""
    way = torch.from_numpy(np.subtract(one, other).reshape(-1))
    if np.isfinite(found := float(torch.dot(way, way))):
        return found
    return float(np.square(np.subtract(one, other, dtype=np.float64)).sum())
