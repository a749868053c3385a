"""Master pull: each round every model of the pool moves a share of the way to the pool's mean."""

from __future__ import annotations

import numpy as np
import torch

from fedcross.strategies.method import Round
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.parts.schedule import Constant, Share
from fedcross.strategies.pool.loops import over_blocks
from fedcross.strategies.pool.pool import Pool, pulled


class MasterPullParams(PooledParams):
    """``alpha`` (schedule): a, weight of a model's own upload; 0 is FedAvg, uniform, 1 independent training."""

    alpha: Share = Constant(value=10 / 11)

    def remarks(self) -> list[str]:
        """Return warnings about settings that are allowed but unusual."""
        if set(self.alpha.values()) == {1.0}:
            return ["method.alpha=1: no model takes anything from another, this is independent training."]
        return []


class MasterPull(Pooled[MasterPullParams, PoolState]):
    """What GitFL (Hu et al., RTSS 2023, arXiv 2211.12049) does to its branches, without its asynchrony.

    ``w_i = a v_i + (1 - a) M`` with the master M, the uniform mean of the uploads v. The mean of the pool stays the
    same, its variance falls to ``a^2``. GitFL weighs branch and master c : 1, with c = 10 for branches of equal
    versions, so a = 10/11; MultiSFL mixes 10 : 1 too. The global model is the uniform mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Deviations: all branches have equal versions. A lost slot keeps its model, and M is the mean of the others; it
    counts in the global mean.
    """

    def recombine(self, state: PoolState, round: Round, members: list[int]) -> None:
        """Pull the uploads towards their mean."""
        pull(state.pool, members, self.params.alpha.at(round.number))


def pull(pool: Pool, members: list[int], own: float) -> None:
    """Set ``w_i = own v_i + (1 - own) M`` for all members, M their uniform mean, summed in float64.

    A value that all members share stays the same to the bit.
    """
    if len(members) < 2 or own == 1:
        return
    pool.integers[members] = pulled(pool.integers[members], own)
    rows, slots = torch.from_numpy(pool.rows), torch.from_numpy(np.asarray(members))

    def task(_: int, columns: slice) -> None:
        piece = rows[slots, columns]
        piece.lerp_(torch.mean(piece, 0, dtype=torch.float64).to(piece.dtype), 1 - own)
        rows[slots, columns] = piece

    over_blocks(task, len(members), pool.rows.itemsize, 0, pool.rows.shape[1])
