"""FedMut: every client starts from the mean, moved forth or back along the mean's last step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.strategies.method import Round, Start
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.pool.mixing import Part
from fedcross.strategies.pool.pool import Array, Arrays, Integers


class FedMutParams(PooledParams):
    radius: float = Field(4.0, ge=0)
    acceleration: float = Field(0.3, ge=0, le=2)
    acceleration_rounds: int = Field(50, ge=1)
    part: Part = "state"


@dataclass(kw_only=True)
class FedMutState(PoolState):
    """The pool, and the mean of the last round's uploads as a row (d,) and its integers (i,)."""

    mean: Array
    counters: Integers


class FedMut(Pooled[FedMutParams, FedMutState]):
    """Hu et al., FedMut: Generalized Federated Learning via Stochastic Mutation, AAAI 2024.

    The server takes the uniform mean w of the uploads and its step ``D = w - w_prev`` since the round before (since the
    initial model, at first). For every entry k the K slots get factors c, half of them 1 and half of them r - 1,
    shuffled over the slots: slot j becomes ``w[k] + rho c_(j,k) D[k]``. With an odd K the last slot becomes w. The
    share ``r = a_r (1 - min(t/T_b, 1))``, t from 0, leans the pool forward at first. The global model is w.

    State: the pool, K models, and w; clients keep none. Wire: one model down, one up.

    Deviations: if an upload is lost, w is the mean of the others, and the lost slot gets a mutation of w. Integer
    entries are those of w; the authors' code mutates and truncates them. A mutated running variance may be below 0;
    training does not read it, and the uploads' mean is evaluated. The code draws each pair in random order before it
    shuffles all pairs; the shuffle alone gives the same distribution.
    """

    def init(self, start: Start) -> FedMutState:
        pool = self.pool_of(start, start.clients_per_round)
        mean, counters = pool.mean_row([0])
        return FedMutState(pool, list(range(len(pool))), mean=mean, counters=counters)

    def recombine(self, state: FedMutState, round: Round, members: list[int]) -> None:
        pool, params, entries = state.pool, self.params, state.pool.layout.entries
        ratio = params.acceleration * (1 - min((round.number - 1) / params.acceleration_rounds, 1.0))
        factors = params.radius * mutations(len(entries), len(pool), ratio, round)
        new, state.counters = pool.mean_row(members)
        step, state.mean = new - state.mean, new
        pool.integers[...], pool.rows[...] = state.counters, new
        for entry, scale in zip(entries, factors.astype(new.dtype)):
            if entry.is_parameter or not (entry.is_integer or params.part == "parameters"):
                for row, factor in zip(pool.rows, scale):
                    row[entry.place] += factor * step[entry.place]

    def global_model(self, state: FedMutState) -> Arrays:
        return state.pool.arrays(state.mean.copy(), state.counters)


def mutations(entries: int, k: int, ratio: float, round: Round) -> NDArray[np.float64]:
    """Return this round's factors c, float64 (entries, k): 1 and ``ratio - 1`` in equal number, 0 for an odd one."""
    pairs = np.tile([1.0, ratio - 1.0], (entries, k // 2))
    found = np.zeros((entries, k))
    found[:, : pairs.shape[1]] = stream(round.seed, "mutation", round.number).permuted(pairs, axis=1)
    return found
