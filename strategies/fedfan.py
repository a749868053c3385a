"""FedFan (this project's): a pool that is pushed along its mean's steps, opens on its way, and averages its means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field

from fedcross.strategies.method import Evaluation, Round, Start, Upload
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.pool import Array, Arrays, Integers
from fedcross.tasks.models.width import Width

SHARPNESS = 4.0  # How fast the pool opens, once its mean has come `reach` visits far.
TAIL = 8.0  # The averages are over about the last t / (TAIL + 1) rounds.


class FedFanParams(PooledParams, Widths):
    alpha: float = Field(0.99, ge=0, lt=1)
    reach: float = Field(8.0, ge=0)
    push: float = Field(1.0, ge=0, le=1)
    correct: bool = True

    def own(self, visits: float) -> float:
        """Return a, the weight of a model's own upload when the mean has come so many visits far."""
        return min(self.alpha, 1 - (self.reach / visits) ** SHARPNESS) if visits > self.reach else 0.0


@dataclass(kw_only=True)
class FedFanState(PoolState):
    """The pool; its mean M and the average of means W, rows (L, d) for L widths; the step D and M_0, rows (d,).

    D and M_0 are those of the widest, the last. ``counters`` are the mean's integers (L, i), ``visit`` u, a visit's
    squared length, ``rounds`` t, and ``updates`` the y_c of each client c that has answered.
    """

    mean: Array
    average: Array
    step: Array
    origin: Array
    counters: Integers
    visit: float
    rounds: int
    updates: dict[int, Arrays]

    def update(self, upload: Upload) -> Arrays:
        """Return how a client changed the parameters; call it before the upload is written."""
        sent = self.pool.model(upload.slot)
        return {e.name: upload.arrays[e.name] - sent[e.name] for e in self.pool.layout.entries if e.is_parameter}

    def corrected(self, uploads: Sequence[Upload], updates: Sequence[Arrays]) -> list[Upload]:
        """Return `uploads` less R, the mean of ``y_c - Y`` over their clients c, and remember their `updates`."""
        known = [*self.updates.values()]
        last_visits = [self.updates[upload.client] for upload in uploads if upload.client in self.updates]
        self.updates |= {upload.client: update for upload, update in zip(uploads, updates)}
        if not last_visits:
            return list(uploads)
        mean = {name: sum(update[name] for update in known) / len(known) for name in last_visits[0]}
        repeated = {n: sum(visit[n] - array for visit in last_visits) / len(uploads) for n, array in mean.items()}
        less = [{name: upload.arrays[name] - array for name, array in repeated.items()} for upload in uploads]
        return [replace(upload, arrays={**upload.arrays, **arrays}) for upload, arrays in zip(uploads, less)]

    def at(self, width: Width) -> Arrays:
        """Return the average of the means at `width`, newly allocated."""
        rank = self.pool.levels.index(width)
        return self.pool.arrays(self.average[rank].copy(), self.counters[rank], width)


class FedFan(Pooled[FedFanParams, FedFanState]):
    """A method of this project (2026), against FedCross's slow start and the noise of its mean: docs/fedfan.md.

    Slot i sends w_i to client c(i), which returns v_i. Means over i are over the uploads of round t; M_t is the mean of
    all K slots, D_t = M_t - M_(t-1) its step, h_t = max(0, cos(D_t, D_(t-1))) the steps' coherence, h_1 = 0::

        u_t  = u_(t-1) + g_t (mean_i |v_i - w_i|^2 - u_(t-1))     squared length of a visit, u_0 = 0
        R_t  = mean_i (y_c(i) - Y)                                how these clients' last updates differ from all
        v'_i = v_i - R_t                                          what slot i keeps; M_t is computed from these
        n_t  = |M_t - M_0| / sqrt(u_t)                            the mean's way, in visits
        a_t  = min(alpha, max(0, 1 - (reach / n_t)^4))
        w_i <- a_t v'_i + (1 - a_t) M_t + push h_t D_t            what slot i sends next
        W_t  = W_(t-1) + g_t (M_t - W_(t-1))                      g_t = 9 / (8 + t)

    y_c is what client c changed in its last visit before this one, Y the mean of y_c over all clients that have
    answered; ``y_c - Y`` is 0 for a client's first upload.

    While the mean has not come far, all models start from it, as in FedAvg, and go on along its coherent steps. Then
    the pool opens, up to FedCross's share of alpha. W is the global model, Shamir and Zhang's polynomial-decay average
    (ICML 2013). The correction is FedVARP's, but for clients that have not answered yet (y_c is 0 there, Y here), the
    push a heavy ball (Polyak 1964) that stops when steps turn.

    State: the pool, K models, four more, M, D, W and M_0, u, and y_c of every client that has answered (N models);
    clients keep none. Wire: one model down, one up.

    Choices:

    - Only trained parameters are corrected, pushed and measured, so no variance falls below 0. Statistics are pulled
      and averaged like weights, integer entries pulled.
    - A lost slot keeps its model, counts in M and follows the pool; it does not count in u. Its y_c stays.
    - A round without uploads changes nothing and does not count in t.
    - With models of several widths (docs/widths.md) M has each value as the mean of the slots that have it, and
      every slot follows its part of M and D. Statistics are those of the slots of one width. h and the way are those of
      the full model, u that of the models that were sent, so `reach` counts shorter visits. No upload is corrected.
    """

    def init(self, start: Start) -> FedFanState:
        pool = self.pool_of(start, start.clients_per_round)
        mean, counters = pool.means()
        return FedFanState(
            pool, list(range(len(pool))), mean=mean, average=mean.copy(), step=np.zeros_like(mean[-1]),
            origin=mean[-1].copy(), counters=counters, visit=0.0, rounds=0, updates={},
        )  # fmt: skip

    def recombine(self, state: FedFanState, round: Round, members: list[int]) -> dict[str, float]:
        pool, trained = state.pool, state.pool.layout.columns("parameters")
        mean, state.counters = pool.means()
        step = mean[-1] - state.mean[-1]
        step[trained.stop :] = 0
        (before, along), (_, now) = loops.gram(np.stack([state.step, step]), np.arange(2), slice(0, len(step)))
        norms = math.sqrt(before * now)
        coherence = max(0.0, min(1.0, float(along) / norms)) if norms > 0 else 0.0
        way = math.sqrt(squared_length(mean[-1, trained] - state.origin[trained]))
        visits, push = way / math.sqrt(state.visit) if state.visit > 0 else 0.0, self.params.push * coherence
        own = self.params.own(visits)
        pool.pull(own, mean, shift=step * push)
        state.average += (mean - state.average) * newest(state.rounds)
        state.mean, state.step = mean, step
        return self.params.measured(pool, round.number) | {"push": push, "own_share": own, "way": visits}

    def aggregate(self, state: FedFanState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Correct the uploads and make the next pool; metrics: push (push times h), own_share (a), way (n)."""
        if not uploads:
            return super().aggregate(state, round, uploads)
        updates = [state.update(upload) for upload in uploads]
        squared = sum(squared_length(array) for update in updates for array in update.values()) / len(updates)
        state.rounds += 1
        state.visit += newest(state.rounds) * (squared - state.visit)
        if self.params.correct and all(width == 1 for width in self.params.widths):
            uploads = state.corrected(uploads, updates)
        return super().aggregate(state, round, uploads)

    def global_model(self, state: FedFanState) -> Arrays:
        return state.at(state.pool.levels[-1])

    def evaluation(self, state: FedFanState) -> Evaluation:
        widths = {width: state.at(width) for width in reversed(state.pool.levels)}
        return Evaluation([], widths) if state.pool.corners else Evaluation([*widths.values()])


def newest(number: int) -> float:
    """Return g, the weight of the newest value in an average over rounds 1 to `number`."""
    return (TAIL + 1) / (TAIL + number)


def squared_length(array: Array) -> float:
    """Return ``||array||^2``, summed in float64."""
    return float(torch.linalg.vector_norm(torch.from_numpy(array.reshape(-1)), dtype=torch.float64)) ** 2
