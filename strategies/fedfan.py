"""FedFan (this project's): a pool that is pushed along its mean's steps, opens as they turn, and averages its means."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedcross.strategies.pool import blocks
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.pool.passes import approach, follow
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.pooled import Pooled, PooledParams
from fedcross.strategies.wire.protocol import Round, Upload


class FedFanParams(PooledParams):
    """Settings of FedFan, beside those of every pool.

    Parameters
    ----------
    alpha : float
        The most that a model keeps of its own upload, below 1; 0 is one model for all.
    half : float
        h: after h turns of the mean a model keeps half of its own upload, after s turns ``s / (s + h)``, up to `alpha`;
        0 is `alpha` as soon as the mean has turned at all.
    push : float
        p: share of the mean's last step that all models are moved on by, before it is multiplied by the steps'
        coherence; 0 never pushes.
    tail : float
        e: the global model is an average over the pool's means, the last ``t / (e + 1)`` of round t weigh most;
        infinite would be the last mean alone, 0 the plain average of all.
    """

    alpha: float = Field(0.99, ge=0, lt=1)
    half: float = Field(0.3, ge=0)
    push: float = Field(1.0, ge=0, le=1)
    tail: float = Field(8.0, ge=0)

    def own(self, turns: float) -> float:
        """Return a, the weight of a model's own upload after so many turns."""
        return min(self.alpha, turns / (turns + self.half)) if turns > 0 else 0.0

    def newest(self, number: int) -> float:
        """Return the weight of the newest mean in the global model of round `number`, counted from 1."""
        return (self.tail + 1) / (self.tail + number)


class FedFan(Pooled[FedFanParams]):
    """A method of this project (2026), against FedCross's slow start and the noise of its mean: docs/fedfan.md.

    With the pool's mean M_t after the uploads of round t, its step ``D_t = M_t - M_(t-1)`` and their coherence
    ``c_t = max(0, cos(D_t, D_(t-1)))``::

        s_t  = s_(t-1) + 1 - c_t                        s_1 = 0, c_1 = 0
        a_t  = min(alpha, s_t / (s_t + h))
        w_i  = a_t v_i + (1 - a_t) M_t + p c_t D_t
        W_t  = W_(t-1) + g_t (M_t - W_(t-1))            g_t = (e + 1) / (e + t)

    As long as the mean goes one way, the models are close together, as in FedAvg, and all go on along its step. Each
    turn of the mean opens the pool, up to FedCross's share of alpha; where steps turn, the push ends by itself. W is
    the global model. The averaging of W is Shamir and Zhang's polynomial-decay average (ICML 2013); a push by the last
    step is Polyak's heavy ball (1964), and to drop it when steps turn is the idea of O'Donoghue and Candes's adaptive
    restart (2015).

    State: the pool, K models, three more, M, D and W, and s; clients keep none. Wire: one model down, one up.

    Cost on the server: one pass that reads the pool for the mean, one that reads and writes it in place, and three
    over single models (step, cosine, average). Memory: the pool and five models.

    Choices:

    - Only trained parameters are pushed, and the cosine is theirs: a variance of batch normalisation that is moved on
      could fall below 0. Statistics are pulled and averaged like weights, integer entries pulled.
    - A lost slot keeps its model, counts in M and follows the pool as all do.
    - A round without uploads changes nothing, and counts in t.
    """

    def setup(self, arrays: Arrays) -> None:
        """Fill the pool with copies of the initial model, from which the first step is counted."""
        super().setup(arrays)
        self.mean, self.counters = self.pool.mean_row([0])
        self.steps, self.average, self.turns = np.zeros((2, len(self.mean)), self.mean.dtype), self.mean.copy(), 0.0
        self._spare, self._newest = np.empty_like(self.mean), 0

    def recombine(self, current: Round, members: list[int]) -> None:
        """Pull all models to their mean, push them along its step, and average the means."""
        last, new = self._newest, 1 - self._newest
        mean, self.counters = self.pool.mean_row(out=self._spare)
        torch.sub(torch.from_numpy(mean), torch.from_numpy(self.mean), out=torch.from_numpy(self.steps[new]))
        self.steps[new, self._trained().stop :] = 0
        products = blocks.gram(self.steps, np.arange(2), slice(None))
        along = max(0.0, cosine(products))
        if products[last, last] > 0:
            self.turns += 1 - along
        self.pushed = self.params.push * along
        follow(self.pool, self.params.own(self.turns), mean, self.steps[new], self.pushed)
        approach(self.average, mean, self.params.newest(current.number))
        self.mean, self._spare, self._newest = mean, self.mean, new

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Make the next pool; the metrics have p c and a of this round as ``push`` and ``own_share``."""
        metrics = super().aggregate(current, uploads)
        return metrics | {"push": self.pushed, "own_share": self.params.own(self.turns)} if uploads else metrics

    def _trained(self) -> slice:
        return self.pool.layout.columns("parameters")

    def global_model(self) -> Arrays:
        """Return the average of the pool's means, newly allocated."""
        return self.pool.layout.views(self.average.copy(), self.counters)

    def state(self) -> State:
        """Return the pool, the queue, the last mean and step, the average, and the turns."""
        state = super().state()
        state.arrays |= {
            "mean.row": self.mean,
            "mean.integers": self.counters,
            "step.row": self.steps[self._newest],
            "average.row": self.average,
        }
        state.values["turns"] = self.turns
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.mean, self.average = (state.arrays[f"{name}.row"].copy() for name in ("mean", "average"))
        self.steps = np.stack([state.arrays["step.row"], np.zeros_like(self.mean)])
        self._spare, self._newest = np.empty_like(self.mean), 0
        self.counters = state.arrays["mean.integers"].copy()
        self.turns = float(state.values["turns"])


def cosine(products: NDArray[np.float64]) -> float:
    """Return the cosine of two vectors, in [-1, 1], from their inner products (2, 2); 0 if one has no length."""
    length = math.sqrt(products[0, 0] * products[1, 1])
    return max(-1.0, min(1.0, float(products[0, 1]) / length)) if length > 0 else 0.0
