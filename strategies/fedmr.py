"""FedMR: the server shuffles the layers of the clients' models instead of averaging them."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.strategies.method import Round
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.pool.mixing import uniform


class FedMRParams(PooledParams):
    first_stage: int = Field(0, ge=0)
    partition: float = Field(0.0, ge=0, le=1)


class FedMR(Pooled[FedMRParams]):
    """Hu et al., Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination, KDD 2024.

    For every entry k of the ``state_dict`` an independent random permutation p_k of the slots, ``w_i[k] =
    v_(p_k(i))[k]``; mean and variance of the pool stay the same. In the first B rounds all slots become the mean of the
    uploads instead. The global model is the uniform mean of the slots.

    State: the pool, K models; clients keep none. Wire: one model down, one up.

    Deviations: a lost slot keeps its model and takes no part in the permutations. As in the authors' code group g
    starts at the first entry whose number is at least ``g * partition * E``; statistics and counters are entries too. A
    permutation is drawn from (seed, round), entry after entry; the code shuffles the last permutation again.
    """

    def recombine(self, state: PoolState, round: Round, members: list[int]) -> None:
        pool, slots = state.pool, np.asarray(members)
        if round.number <= self.params.first_stage:
            pool.mix(uniform(len(pool), members))
            return
        orders = permutations(len(pool.layout.entries), len(slots), self.params.partition, round)
        for entry, order in zip(pool.layout.entries, orders, strict=True):
            values = (pool.integers if entry.is_integer else pool.rows)[:, entry.place]
            values[slots] = values[slots[order]]


def permutations(entries: int, m: int, partition: float, round: Round) -> NDArray[np.int64]:
    """Return this round's permutations of m positions, int64 (entries, m); the entries of a group share one."""
    group = groups(entries, partition)
    draw = stream(round.seed, "recombination", round.number)
    return draw.permuted(np.tile(np.arange(m), (group[-1] + 1, 1)), axis=1)[group]


def groups(entries: int, partition: float) -> list[int]:
    """Return the group, from 0, of each entry: one permutation moves all entries of a group."""
    found, group = [], -1
    for entry in range(entries):
        group += partition == 0 or entry >= entries * partition * (group + 1)
        found.append(group)
    return found
