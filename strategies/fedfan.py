"""FedFan (this project's): a pool that is pushed along its mean's steps, opens on its way, and averages its means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field

from fedcross.strategies.method import Evaluation, Round, Start, Upload
from fedcross.strategies.parts.control_variates import MIB, ControlVariates, capacity
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.pool import Array, Arrays, Integers
from fedcross.tasks.models.width import Width

FEW = 3  # Fewer visits than this say nothing about what is usual, once something is known about it.


class FedFanParams(PooledParams, Widths):
    alpha: float = Field(0.99, ge=0, lt=1)
    reach: float = Field(8.0, ge=0)
    sharpness: float = Field(8.0, gt=0)
    push: float = Field(1.0, ge=0, le=1)
    tail: float = Field(8.0, ge=0)
    limit: float | None = Field(2.0, ge=1, le=1e6)
    shrink: float = Field(0.002, ge=0, lt=1)
    memory_mb: int = Field(256, ge=0)

    def room_remarks(self, nbytes: int, clients: int) -> list[str]:
        """Return a warning if not all of `clients`, with `nbytes` of trained parameters each, can be remembered."""
        room = capacity(self.memory, nbytes)
        if not self.memory or room >= clients:
            return []
        return [
            f"method.memory_mb={self.memory_mb}: room for what {room} of {clients} clients changed last; the others' "
            f"uploads are not corrected. All need {math.ceil(clients * nbytes / MIB)}, in each checkpoint too."
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
    """The pool; its mean M and the average of means W, rows (L, d) for L widths; the step D and M_0, rows (d,).

    ``counters`` are the mean's integers (L, i), ``visit`` u, a visit's squared length. D, M_0: of the widest, the last.
    """

    mean: Array
    average: Array
    step: Array
    origin: Array
    counters: Integers
    variates: ControlVariates
    visit: float = 0.0

    def pairs(self, upload: Upload) -> dict[str, tuple[Array, Array]]:
        """Return each parameter as it was sent and as it came back; call it before the upload is written."""
        sent = self.pool.model(upload.slot)
        return {e.name: (sent[e.name], upload.arrays[e.name]) for e in self.pool.layout.entries if e.is_parameter}

    def shortened(self, upload: Upload, share: float) -> Upload:
        """Return a copy of `upload` with `share` of what its client changed."""
        shorter = {name: sent + share * (new - sent) for name, (sent, new) in self.pairs(upload).items()}
        return replace(upload, arrays={**upload.arrays, **shorter})

    def at(self, width: Width) -> Arrays:
        """Return the average of the means at `width`, newly allocated."""
        rank = self.pool.levels.index(width)
        return self.pool.arrays(self.average[rank].copy(), self.counters[rank], width)


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
        pool = self.pool_of(start, start.clients_per_round)
        (mean, counters), variates = pool.means(), ControlVariates(pool.layout, self.params.memory)
        return FedFanState(
            pool, list(range(len(pool))), mean=mean, average=mean.copy(), step=np.zeros_like(mean[-1]),
            origin=mean[-1].copy(), counters=counters, variates=variates,
        )  # fmt: skip

    def recombine(self, state: FedFanState, round: Round, members: list[int]) -> dict[str, float]:
        pool, trained = state.pool, state.pool.layout.columns("parameters")
        mean, state.counters = pool.means()
        step = mean[-1] - state.mean[-1]
        step[trained.stop :] = 0
        (before, along), (_, now) = loops.gram(np.stack([state.step, step]), np.arange(2), slice(0, len(step)))
        length = math.sqrt(before * now)
        coherence = max(0.0, min(1.0, float(along) / length)) if length > 0 else 0.0
        way = math.sqrt(squared_distance(mean[-1, trained], state.origin[trained]))
        visits, push = way / math.sqrt(state.visit) if state.visit > 0 else 0.0, self.params.push * coherence
        own = self.params.own(visits)
        pool.pull(own, mean, shift=step * push)
        state.average += (mean - state.average) * self.params.newest(round.number)
        if self.params.shrink:
            pool.rows[:, trained] *= 1 - self.params.shrink
        state.mean, state.step = mean, step
        return self.params.measured(pool, round.number) | {"push": push, "own_share": own, "way": visits}

    def aggregate(self, state: FedFanState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Make the next pool; metrics: push (p c), own_share (a), way (n), shortened (visits), recalled (s)."""
        if not uploads:
            return super().aggregate(state, round, uploads)
        lengths = [sum(squared_distance(new, sent) for sent, new in state.pairs(u).values()) for u in uploads]
        most = self.longest(state, lengths)
        uploads = [state.shortened(u, math.sqrt(most / n)) if n > most else u for u, n in zip(uploads, lengths)]
        length = sum(min(n, most) for n in lengths) / len(lengths)
        uploads = state.variates.correct(uploads, state.pool.model)
        state.visit += self.params.newest(round.number) * (length - state.visit)
        metrics = super().aggregate(state, round, uploads) | {"shortened": float(sum(n > most for n in lengths))}
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
        return state.at(state.pool.levels[-1])

    def evaluation(self, state: FedFanState) -> Evaluation:
        widths = {width: state.at(width) for width in reversed(state.pool.levels)}
        return Evaluation([], widths) if state.pool.corners else Evaluation([*widths.values()])


def squared_distance(one: Array, other: Array) -> float:
    """Return ``||one - other||^2``; in float64 where it is too large for the arrays' dtype."""
    way = torch.from_numpy(np.subtract(one, other).reshape(-1))
    found = float(torch.dot(way, way))
    return found if math.isfinite(found) else float(np.square(np.subtract(one, other, dtype=np.float64)).sum())
