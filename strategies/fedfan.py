"""FedFan (this project's): a pool that is pushed along its mean's steps, opens on its way, and averages its means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.strategies.method import Evaluation, Round, Start, Upload
from fedcross.strategies.parts.averaging import approach, shrink, squared_distance
from fedcross.strategies.parts.control_variates import MIB, ControlVariates, places
from fedcross.strategies.parts.corners import WidthPool
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.pool import Array, Arrays
from fedcross.tasks.models.width import Width

FEW = 3
"""Fewer visits than this say nothing about what is usual, once something is known about it."""


class FedFanParams(PooledParams, Widths):
    """Settings of FedFan, explained in ``conf/method/fedfan.yaml``.

    A visit is as long as the root mean square of what the round's clients changed; ``reach`` and ``limit`` are in
    visits. Of the clients' changes in ``memory_mb`` those heard least recently are forgotten first.
    """

    alpha: float = Field(0.99, ge=0, lt=1)
    reach: float = Field(8.0, ge=0)
    sharpness: float = Field(8.0, gt=0)
    push: float = Field(1.0, ge=0, le=1)
    tail: float = Field(8.0, ge=0)
    limit: float | None = Field(2.0, ge=1, le=1e6)
    shrink: float = Field(0.002, ge=0, lt=1)
    memory_mb: int = Field(256, ge=0)

    def faults(self, clients_per_round: int) -> list[str]:
        """Return an error if some width gets no slot."""
        k, widths = clients_per_round, list(self.widths)
        fault = f"method.widths={widths}: {k} models; each width needs one. Raise clients_per_round."
        return [fault] if k < len(widths) else []

    def room_remarks(self, nbytes: int, clients: int) -> list[str]:
        """Return a warning if not all of `clients`, with `nbytes` of trained parameters each, can be remembered."""
        room = places(self.memory, nbytes)
        if not self.memory or room >= clients:
            return []
        return [
            f"method.memory_mb={self.memory_mb}: room for what {room} of {clients} clients changed last; the others' "
            f"uploads are not corrected. All: {math.ceil(clients * nbytes / MIB)}, in memory and in each checkpoint; "
            "none: 0."
        ]

    @property
    def memory(self) -> int:
        """Bytes for what clients changed last; 0 if models are narrow, because a client's then differ in size."""
        return 0 if any(width < 1 for width in self.widths) else self.memory_mb * MIB

    def own(self, visits: float) -> float:
        """Return a, the weight of a model's own upload when the mean has come so many visits far."""
        return min(self.alpha, 1 - (self.reach / visits) ** self.sharpness) if visits > self.reach else 0.0

    def newest(self, number: int) -> float:
        """Return g, the weight of the newest value in an average over rounds 1 to `number`."""
        return (self.tail + 1) / (self.tail + number)


@dataclass(kw_only=True)
class FedFanState(PoolState):
    """The pool, and rows (d,): its mean M, the last step D, the average of means W, the initial model M_0.

    ``counters`` are the mean's integers (i,), ``statistics`` the mean buffers (L, d - p) of each width, ``visit`` u,
    a visit's squared length, ``way`` the mean's distance from the initial model, ``pushed`` p c.
    """

    mean: Array
    step: Array
    average: Array
    origin: Array
    counters: Array
    statistics: Array
    variates: ControlVariates
    visit: float = 0.0
    way: float = 0.0
    pushed: float = 0.0

    @property
    def visits(self) -> float:
        """n, how many visits' lengths the mean is away from the initial model."""
        return self.way / math.sqrt(self.visit) if self.visit > 0 else 0.0

    @property
    def trained(self) -> list[str]:
        """Names of the parameters."""
        return [entry.name for entry in self.pool.layout.entries if entry.is_parameter]

    def changed(self, upload: Upload) -> float:
        """Return the squared length of what a client changed; call it before the upload is written."""
        sent = self.pool.model(upload.slot)
        return sum(squared_distance(upload.arrays[name], sent[name]) for name in self.trained)

    def shortened(self, upload: Upload, share: float) -> Upload:
        """Return a copy of `upload` with `share` of what its client changed."""
        sent, new = self.pool.model(upload.slot), upload.arrays
        return replace(
            upload, arrays={**new, **{name: sent[name] + share * (new[name] - sent[name]) for name in self.trained}}
        )

    def at(self, pool: WidthPool, width: Width) -> Arrays:
        """Return the average of the means at `width`."""
        row = self.average.copy()
        row[pool.layout.parameter_size :] = self.statistics[pool.levels.index(width)]
        return pool.assembled(row, width)


class FedFan(Pooled[FedFanParams, FedFanState]):
    """A method of this project (2026), against FedCross's slow start and the noise of its mean: docs/fedfan.md.

    With the pool's mean M_t after the uploads v_i of round t, from the models w_i that were sent, the mean's step
    ``D_t = M_t - M_(t-1)`` and the steps' coherence ``c_t = max(0, cos(D_t, D_(t-1)))``, c_1 = 0::

        u_t  = u_(t-1) + g_t (mean_i |v_i - w_i|^2 - u_(t-1))     squared length of a visit, u_0 = 0
        v'_i = v_i - s b_i (y_c(i) - Y)                           without what its client changes in every visit
        n_t  = |M_t - M_0| / sqrt(u_t)                            the mean's way, in visits; M is the mean of all v'_i
        a_t  = min(alpha, max(0, 1 - (reach / n_t)^q))
        w_i  = (1 - shrink) (a_t v'_i + (1 - a_t) M_t + p c_t D_t)
        W_t  = W_(t-1) + g_t (M_t - W_(t-1))                      g_t = (e + 1) / (e + t)

    Before that, uploads are shortened to ``|v_i - w_i| <= limit sqrt(u_(t-1))``. Where more than half of a round's
    visits (three or more that changed something) are longer, as in the first round, the bound is limit^2 times the
    median of their lengths (of two, the lower one). y_c is what client c changed last, Y the mean of all y_c, and s and
    b_i are measured (:class:`~strategies.parts.control_variates.ControlVariates`).

    While the mean has not come far, all models start from it, as in FedAvg, and go on along its coherent steps. Then
    the pool opens, up to FedCross's share of alpha. W is the global model, Shamir and Zhang's polynomial-decay average
    (ICML 2013). The correction is that of SAGA and FedVARP, the push a heavy ball (Polyak 1964) that stops when steps
    turn, shrinking is decoupled weight decay on the server (FedLAW, ICML 2023).

    State: the pool, K models, four more, M, D, W and M_0, and u; clients keep none. Wire: one model down, one up.

    Choices:

    - Only trained parameters are shortened, corrected, pushed, measured and shrunk, so no variance falls below 0.
      Statistics are pulled and averaged like weights, integer entries pulled.
    - A lost slot keeps its model, counts in M and follows the pool; it does not count in u or s. Its y_c stays.
    - A client that is not in the memory is not corrected. s is measured for each entry of the ``state_dict`` alone.
    - A round without uploads changes nothing, and counts in t.
    - With models of several widths (docs/widths.md) M has each value as the mean of the slots that have it, and
      every slot follows its part of M and D. Statistics are those of the slots of one width. c and the way are those of
      the full model. No upload is corrected.
    """

    def init(self, start: Start) -> FedFanState:
        """Return a pool of copies of the initial model, from which the first step and the way are counted."""
        begun = super().init(start)
        mean, counters = begun.pool.mean_row()
        statistics = begun.pool.buffers() if isinstance(begun.pool, WidthPool) else np.empty((0, 0))
        return FedFanState(
            begun.pool, begun.queue, mean=mean, step=np.zeros_like(mean), average=mean.copy(), origin=mean.copy(),
            counters=counters, statistics=statistics, variates=ControlVariates(begun.pool.layout, self.params.memory),
        )  # fmt: skip

    def recombine(self, state: FedFanState, round: Round, members: list[int]) -> None:
        """Pull all models to their mean, push them along its step, and average the means."""
        pool, trained = state.pool, state.pool.layout.columns("parameters")
        mean, state.counters = pool.mean_row()
        step = mean - state.mean
        step[trained.stop :] = 0
        along = max(0.0, cosine(loops.gram(np.stack([state.step, step]), np.arange(2), slice(None))))
        state.way = math.sqrt(squared_distance(mean[trained], state.origin[trained]))
        state.pushed = self.params.push * along
        own, newest = self.params.own(state.visits), self.params.newest(round.number)
        for average, found in zip(state.statistics, pool.buffers() if isinstance(pool, WidthPool) else ()):
            approach(average, found, newest)
        pool.follow(own, mean, step, state.pushed)
        approach(state.average, mean, newest)
        if self.params.shrink:
            shrink(pool, trained, self.params.shrink)
        state.mean, state.step = mean, step

    def aggregate(self, state: FedFanState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Make the next pool.

        Metrics: ``push`` (p c), ``own_share`` (a), ``way`` (n), ``shortened`` (visits), ``recalled`` (s).
        """
        if not uploads:
            return super().aggregate(state, round, uploads)
        lengths = [state.changed(upload) for upload in uploads]
        most = self.longest(state, lengths)
        pairs = list(zip(uploads, lengths))
        uploads = [state.shortened(upload, math.sqrt(most / n)) if n > most else upload for upload, n in pairs]
        length = sum(min(n, most) for n in lengths) / len(lengths)
        uploads = state.variates.correct(uploads, state.pool.model)
        state.visit += self.params.newest(round.number) * (length - state.visit)
        metrics = super().aggregate(state, round, uploads)
        metrics |= {"push": state.pushed, "own_share": self.params.own(state.visits), "way": state.visits}
        metrics["shortened"] = float(sum(n > most for n in lengths))
        return metrics | ({"recalled": state.variates.recalled()} if state.variates.most else {})

    def longest(self, state: FedFanState, lengths: Sequence[float]) -> float:
        """Return the squared length to which longer visits are shortened, from the squared lengths of the round's."""
        if self.params.limit is None:
            return math.inf
        factor, moved = self.params.limit**2, sorted(length for length in lengths if length > 0)
        if moved and (len(moved) >= FEW or state.visit == 0):
            median = moved[(len(moved) - 1) // 2]
            if median > factor * state.visit:
                return factor**2 * median
        return factor * state.visit if state.visit > 0 else math.inf

    def global_model(self, state: FedFanState) -> Arrays:
        """Return the average of the pool's means, newly allocated."""
        if isinstance(state.pool, WidthPool):
            return state.at(state.pool, state.pool.levels[-1])
        return state.pool.layout.views(state.average.copy(), state.counters)

    def evaluation(self, state: FedFanState) -> Evaluation:
        """Return the average of the means, for every width."""
        pool = state.pool
        if not isinstance(pool, WidthPool):
            return Evaluation([self.global_model(state)])
        return Evaluation([], {width: state.at(pool, width) for width in reversed(pool.levels)})


def cosine(products: NDArray[np.float64]) -> float:
    """Return the cosine of two vectors, in [-1, 1], from their inner products (2, 2); 0 if one has no length."""
    length = math.sqrt(products[0, 0] * products[1, 1])
    return max(-1.0, min(1.0, float(products[0, 1]) / length)) if length > 0 else 0.0
