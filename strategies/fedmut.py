"""FedMut: every client starts from the mean, moved forth or back along the mean's last step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.pool.passes import mutate
from fedcross.strategies.pool.similarity import Part
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.pooled import Pooled, PooledParams
from fedcross.strategies.wire.protocol import Round


class FedMutParams(PooledParams):
    """Settings of FedMut, beside those of every pool.

    Parameters
    ----------
    radius : float
        rho: length of a mutation in units of the mean's last step; 0 is FedAvg with equal weights.
    acceleration : float
        a_r: in round 1 a backward mutation is this much shorter than a forward one, as a share.
    acceleration_rounds : int
        T_b: rounds in which that share falls to 0.
    part : {"state", "parameters"}
        Values that mutate: all float entries (the authors' code), or the trained ones.
    """

    radius: float = Field(4.0, ge=0)
    acceleration: float = Field(0.3, ge=0, le=2)
    acceleration_rounds: int = Field(50, ge=1)
    part: Part = "state"

    def ratio(self, number: int) -> float:
        """Return r = a_r (1 - min(t/T_b, 1)) of round `number`, counted from 1; t counts from 0."""
        return self.acceleration * (1 - min((number - 1) / self.acceleration_rounds, 1.0))


class FedMut(Pooled[FedMutParams]):
    """Hu et al., FedMut: Generalized Federated Learning via Stochastic Mutation, AAAI 2024.

    The server takes the uniform mean w of the uploads and its step ``D = w - w_prev`` since the round before (since the
    initial model, at first). For every entry k the K slots get factors c, half of them 1 and half of them r - 1,
    shuffled over the slots: slot j becomes ``w[k] + rho c_(j,k) D[k]``. With an odd K the last slot becomes w. The
    share ``r = a_r (1 - min(t/T_b, 1))`` leans the pool forward at first; with r = 0 and an even K the mean of the
    slots is w. The global model is w.

    State: the pool, K models, and w; clients keep none. Wire: one model down, one up.

    Cost on the server: one pass that reads and writes the pool once, in place.

    Choices and deviations:

    - Slots hold nothing of their own: if an upload is lost, w is the mean of the others, and the lost slot gets a
      mutation of w as all do.
    - Integer entries are those of w; the authors' code mutates and truncates them too. A mutated running variance of
      batch normalisation may be below 0; training does not read it, and the uploads' mean is evaluated. If clients take
      very few steps, choose ``part=parameters``.
    - The code draws each pair of factors in random order and then shuffles all pairs of an entry; the shuffle alone
      gives the same distribution. It is drawn from (seed, round).
    """

    def setup(self, arrays: Arrays) -> None:
        """Fill the pool with copies of the initial model, which is also the first mean."""
        super().setup(arrays)
        self.mean, self.counters = self.pool.mean_row([0])

    def recombine(self, current: Round, members: list[int]) -> None:
        """Take the mean of the uploads and spread the slots around it."""
        params, entries = self.params, self.pool.layout.entries
        factors = params.radius * mutations(len(entries), len(self.pool), params.ratio(current.number), current)
        if params.part == "parameters":
            factors[[not entry.is_parameter for entry in entries]] = 0.0
        self.counters = mutate(self.pool, members, self.mean, factors)

    def global_model(self) -> Arrays:
        """Return the mean of the last round's uploads, newly allocated."""
        return self.pool.layout.views(self.mean.copy(), self.counters)

    def state(self) -> State:
        """Return the pool, the queue and the mean."""
        state = super().state()
        state.arrays |= {"mean.row": self.mean, "mean.integers": self.counters}
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.mean, self.counters = state.arrays["mean.row"].copy(), state.arrays["mean.integers"].copy()


def mutations(entries: int, k: int, ratio: float, current: Round) -> NDArray[np.float64]:
    """Return this round's factors c, float64 (entries, k): 1 and ``ratio - 1`` in equal number, 0 for an odd one."""
    pairs = np.tile([1.0, ratio - 1.0], (entries, k // 2))
    found = np.zeros((entries, k))
    found[:, : pairs.shape[1]] = stream(current.seed, "mutation", current.number).permuted(pairs, axis=1)
    return found
