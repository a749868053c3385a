"""FedMR: the server shuffles the layers of the clients' models instead of averaging them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.strategies.pool.mixing import uniform
from fedcross.strategies.pool.passes import recombine
from fedcross.strategies.round.pooled import Pooled, PooledParams
from fedcross.strategies.wire.protocol import Round


class FedMRParams(PooledParams):
    """Settings of FedMR, beside those of every pool.

    Parameters
    ----------
    first_stage : int
        B: in rounds 1 to B every slot becomes the uniform mean of the round's uploads.
    partition : float
        Share of the model's entries that one permutation moves together, 0 to 1: 0 moves every entry on its own, .25
        moves four groups of consecutive entries, 1 moves whole models.
    """

    first_stage: int = Field(0, ge=0)
    partition: float = Field(0.0, ge=0, le=1)

    def remarks(self) -> list[str]:
        """Return warnings about settings that are allowed but unusual."""
        if self.partition == 1:
            return ["method.partition=1: whole models change slots and nothing is recombined; see method=daisychain."]
        return []


class FedMR(Pooled[FedMRParams]):
    """Hu et al., Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination, KDD 2024.

    For every entry k of the ``state_dict`` an independent random permutation p_k of the slots, ``w_i[k] =
    v_(p_k(i))[k]``. Every entry of every upload stays in the pool, so the mean and the variance of the pool stay the
    same. In the first B rounds (``first_stage``) all slots become the mean of the uploads instead. The global model is
    the uniform mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Cost on the server: one pass that reads and writes the pool once, in place.

    Choices and deviations:

    - If no upload is accepted for a slot, the slot keeps its model and takes no part in that round's permutations; it
      counts in the global mean.
    - `partition` follows the authors' code, in which group g of consecutive entries starts at the first entry whose
      number is at least ``g * partition * E`` of E. Entries are counted as the code does: a weight, a bias and each
      statistic of a batch normalisation are entries, integer counters too.
    - A permutation is drawn from (seed, round), entry after entry; the code shuffles the last permutation again.
    """

    def recombine(self, current: Round, members: list[int]) -> None:
        """Move every entry by a permutation of its own, or take the mean in the first stage."""
        if current.number <= self.params.first_stage:
            self.pool.mix(uniform(len(self.pool), members))
        else:
            sources = permutations(len(self.pool.layout.entries), len(members), self.params.partition, current)
            recombine(self.pool, members, sources)


def groups(entries: int, partition: float) -> list[int]:
    """Return the group, from 0, of each entry: one permutation moves all entries of a group."""
    found, group = [], -1
    for entry in range(entries):
        if partition == 0 or entry >= entries * partition * (group + 1):
            group += 1
        found.append(group)
    return found


def permutations(entries: int, m: int, partition: float, current: Round) -> NDArray[np.int64]:
    """Return this round's permutations of m positions, int64 (entries, m); the entries of a group share one."""
    group = groups(entries, partition)
    draw = stream(current.seed, "recombination", current.number)
    orders = draw.permuted(np.tile(np.arange(m), (group[-1] + 1, 1)), axis=1)
    return orders[group]
