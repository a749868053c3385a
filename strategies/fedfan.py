"""FedFan (this project's): a pool that is pushed along its mean's steps, opens on its way, and averages its means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedcross.strategies.parts.control_variates import MIB, ControlVariates, places
from fedcross.strategies.parts.widths import Widths
from fedcross.strategies.pool import blocks
from fedcross.strategies.pool.layout import Array, Arrays, Layout
from fedcross.strategies.pool.passes import approach, follow, shrink, squared_distance
from fedcross.strategies.pool.pool import Pool
from fedcross.strategies.pool.sliced import SlicedPool
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.pooled import Pooled, PooledParams
from fedcross.strategies.round.sized_slots import SizedSlots
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.tasks.models.slicing.plan import Size

FEW = 3
"""Fewer visits than this say nothing about what is usual, once something is known about it."""


class FedFanParams(PooledParams, Widths):
    """Settings of FedFan, beside those of every pool.

    Parameters
    ----------
    alpha : float
        The most that a model keeps of its own upload, below 1; 0 is one model for all.
    reach : float
        The pool opens when its mean has come this many visits far from the initial model; 0 is `alpha` at once. A
        visit is as long as the root mean square of what the round's clients changed.
    sharpness : float
        q: how fast the pool opens once its mean is beyond `reach`.
    push : float
        p: share of the mean's last step that all models are moved on by, before it is multiplied by the steps'
        coherence; 0 never pushes.
    tail : float
        e: the global model is an average over the pool's means, the last ``t / (e + 1)`` of round t weigh most;
        infinite would be the last mean alone, 0 the plain average of all.
    limit : float, optional
        A visit that is more than this many times as long as visits were up to now is shortened to that, unless more
        than half of the round's visits are; at most 1e6; None: none is.
    shrink : float
        Share by which all parameters are made smaller in a round; 0 never.
    memory_mb : int
        MiB for what each client changed last (:mod:`strategies.parts.control_variates`); the clients heard least
        recently are forgotten first. 0 corrects no upload, nor does a pool of several widths.
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
        if clients_per_round >= len(self.widths):
            return []
        widths = list(self.widths)
        return [
            f"method.widths={widths}: {clients_per_round} models; each width needs one. Raise clients_per_round or "
            "give fewer widths."
        ]

    def room_remarks(self, nbytes: int, clients: int) -> list[str]:
        """Return a warning if not all of `clients`, with `nbytes` of trained parameters each, can be remembered."""
        room = places(self.memory_mb * MIB, nbytes)
        if self.cuts() or not self.memory_mb or room >= clients:
            return []
        wanted = math.ceil(clients * nbytes / MIB)
        return [
            f"method.memory_mb={self.memory_mb}: room for what {room} of {clients} clients changed last; the others' "
            f"uploads are not corrected. All: {wanted}, in memory and in each checkpoint; none: 0."
        ]

    def cuts(self) -> bool:
        """Return whether some model of the pool is not the full one."""
        return any(width < 1 for width in self.widths)

    def own(self, visits: float) -> float:
        """Return a, the weight of a model's own upload when the mean has come so many visits far."""
        return min(self.alpha, 1 - (self.reach / visits) ** self.sharpness) if visits > self.reach else 0.0

    def newest(self, number: int) -> float:
        """Return the weight of the newest value in an average over rounds 1 to `number`."""
        return (self.tail + 1) / (self.tail + number)


class FedFan(Pooled[FedFanParams], SizedSlots[FedFanParams]):
    """A method of this project (2026), against FedCross's slow start and the noise of its mean: docs/fedfan.md.

    With the pool's mean M_t after the uploads v_i of round t, from the models w_i that were sent, the mean's step
    ``D_t = M_t - M_(t-1)`` and the steps' coherence ``c_t = max(0, cos(D_t, D_(t-1)))``, c_1 = 0, where v_i is already
    the upload that was shortened to ``|v_i - w_i| <= limit sqrt(u_(t-1))``, u_0 = 0, if it was longer; where more than
    half of a round's visits (three or more that changed something) are longer than that, as in the first round, to
    limit^2 times the median of their lengths (of two, the lower one)::

        u_t  = u_(t-1) + g_t (mean_i |v_i - w_i|^2 - u_(t-1))     squared length of a visit
        v'_i = v_i - s b_i (y_c(i) - Y)                           without what its client changes in every visit
        n_t  = |M_t - M_0| / sqrt(u_t)                            the mean's way, in visits; M is the mean of all v'_i
        a_t  = min(alpha, max(0, 1 - (reach / n_t)^q))
        w_i  = (1 - shrink) (a_t v'_i + (1 - a_t) M_t + p c_t D_t)
        W_t  = W_(t-1) + g_t (M_t - W_(t-1))                      g_t = (e + 1) / (e + t)

    y_c is what client c changed last, Y the mean of all y_c, and s and b_i are measured
    (:class:`~strategies.parts.control_variates.ControlVariates`).

    As long as the mean has not come far, compared with what one client changes, all models start from it, as in FedAvg,
    and go on along its step while its steps agree. Then the pool opens, up to FedCross's share of alpha. Where clients
    differ much, their visits are long and the mean's way is short, so the pool stays closed for longer. W is the global
    model. What a client repeats is taken off as in SAGA and FedVARP. To shrink the parameters is decoupled weight decay
    on the server; that smaller models generalise better is FedLAW's finding (ICML 2023). The averaging of W is Shamir
    and Zhang's polynomial-decay average (ICML 2013); a push by the last step is Polyak's heavy ball (1964), and to drop
    it when steps turn is the idea of O'Donoghue and Candes's adaptive restart (2015).

    State: the pool, K models, four more, M, D, W and M_0, and u; clients keep none. Wire: one model down, one up.

    Cost on the server: one pass that compares the uploads with what was sent, one that reads the pool for the mean, one
    that reads and writes it in place, and four over single models (step, cosine, way, average). Memory: the pool and
    six models. The correction: two passes over the uploads and what is remembered, three models, one for each upload
    and up to `memory_mb`, of which a checkpoint makes and holds a copy. To shrink is one more pass over the pool.

    Choices:

    - Only trained parameters are shortened, corrected, pushed, measured and shrunk: a variance of batch normalisation
      that is moved on could fall below 0. Statistics are pulled and averaged like weights, integer entries pulled.
    - A lost slot keeps its model, counts in M and follows the pool as all do; it does not count in u or s. Its
      client's y_c stays.
    - A client that `memory_mb` has no room for, or that was not heard before, is not corrected. s is measured, and the
      correction made, for each entry of the ``state_dict`` alone.
    - A round without uploads changes nothing, and counts in t.
    - With models of several widths (docs/heterogeneous.md) M has each value as the mean of the slots that have it, and
      every slot follows the part of M, and of D, that it has. Statistics are those of the slots of one width. c and
      the way are those of the full model. No upload is corrected, since a client's models differ in size.
    """

    def make_pool(self, layout: Layout) -> Pool:
        """Return a pool of full models, or of slices if `widths` are set."""
        return self.pool_of_widths(layout, self.federation.clients_per_round, self.params.storage)

    def setup(self, arrays: Arrays) -> None:
        """Fill the pool with copies of the initial model, from which the first step and the way are counted."""
        super().setup(arrays)
        self.mean, self.counters = self.pool.mean_row()
        self.origin, self.average = self.mean.copy(), self.mean.copy()
        self.steps = np.zeros((2, len(self.mean)), self.mean.dtype)
        self._spare, self._newest, self.visit, self._way = np.zeros_like(self.mean), 0, 0.0, 0.0
        self.statistics = self._statistics()
        room = 0 if self.params.cuts() else self.params.memory_mb * MIB
        self.variates = ControlVariates(self.pool.layout, room)

    def dispatch(self, current: Round) -> list[Payload]:
        """Send every slot to a client; with `widths`, to one whose device can hold its model."""
        return self.dispatch_sized(current) if self.params.widths else super().dispatch(current)

    def recombine(self, current: Round, members: list[int]) -> None:
        """Pull all models to their mean, push them along its step, and average the means."""
        new, trained = 1 - self._newest, self._trained()
        mean, self.counters = self.pool.mean_row(out=self._spare)
        torch.sub(torch.from_numpy(mean), torch.from_numpy(self.mean), out=torch.from_numpy(self.steps[new]))
        self.steps[new, trained.stop :] = 0
        # Always the last step before the new one: a product's last bits depend on its rows' places.
        along = max(0.0, cosine(blocks.gram(self.steps, np.array([1 - new, new]), slice(None))))
        self._way = math.sqrt(squared_distance(mean[trained], self.origin[trained]))
        self.pushed = self.params.push * along
        own, newest, statistics = self.params.own(self.visits), self.params.newest(current.number), self._statistics()
        if isinstance(self.pool, SlicedPool):
            self.pool.follow(own, mean, self.steps[new], self.pushed)
            for average, found in zip(self.statistics, statistics):
                approach(average, found, newest)
        else:
            follow(self.pool, own, mean, self.steps[new], self.pushed)
        approach(self.average, mean, newest)
        if self.params.shrink:
            shrink(self.pool, trained, self.params.shrink)
        self.mean, self._spare, self._newest = mean, self.mean, new

    @property
    def visits(self) -> float:
        """n, how many visits' lengths the mean is away from the initial model."""
        return self._way / math.sqrt(self.visit) if self.visit > 0 else 0.0

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Make the next pool.

        Metrics: ``push`` (p c), ``own_share`` (a), ``way`` (n), ``shortened`` (visits), ``recalled`` (s).
        """
        if not uploads:
            return {}
        lengths = [self._changed(upload) for upload in uploads]
        most = self._longest(lengths)
        uploads = [
            self._shortened(upload, math.sqrt(most / n)) if n > most else upload for upload, n in zip(uploads, lengths)
        ]
        length = sum(min(n, most) for n in lengths) / len(lengths)
        uploads = self.variates.correct(uploads, self.pool.model)
        self.visit += self.params.newest(current.number) * (length - self.visit)
        metrics = super().aggregate(current, uploads)
        metrics |= {"push": self.pushed, "own_share": self.params.own(self.visits), "way": self.visits}
        metrics["shortened"] = float(sum(n > most for n in lengths))
        return metrics | ({"recalled": self.variates.recalled()} if self.variates.most else {})

    def _longest(self, lengths: Sequence[float]) -> float:
        """Return the squared length to which longer visits are shortened, from the squared lengths of the round's."""
        if self.params.limit is None:
            return math.inf
        factor, moved = self.params.limit**2, sorted(length for length in lengths if length > 0)
        if moved and (len(moved) >= FEW or self.visit == 0):
            median = moved[(len(moved) - 1) // 2]
            if median > factor * self.visit:
                return factor**2 * median
        return factor * self.visit if self.visit > 0 else math.inf

    def _changed(self, upload: Upload) -> float:
        """Return the squared length of what a client changed; call it before the upload is written."""
        sent = self.pool.model(upload.slot)
        return sum(squared_distance(upload.arrays[name], sent[name]) for name in self.parameter_names)

    def _shortened(self, upload: Upload, share: float) -> Upload:
        """Return `upload` with `share` of what its client changed; another object."""
        sent = self.pool.model(upload.slot)
        shorter = {name: sent[name] + share * (upload.arrays[name] - sent[name]) for name in self.parameter_names}
        return replace(upload, arrays={**upload.arrays, **shorter})

    def _trained(self) -> slice:
        return self.pool.layout.columns("parameters")

    def _statistics(self) -> Array:
        """Return the mean float buffers (L, d - p) of the slots of each width; none without widths."""
        return self.pool.buffers() if isinstance(self.pool, SlicedPool) else np.empty((0, 0))

    def global_model(self) -> Arrays:
        """Return the average of the pool's means, newly allocated."""
        if isinstance(self.pool, SlicedPool):
            return self._slice(self.pool, self.pool.levels[-1])
        return self.pool.layout.views(self.average.copy(), self.counters)

    def slice_models(self) -> dict[Size, Arrays]:
        """Return the average of the means for every width."""
        if not isinstance(self.pool, SlicedPool):
            return {}
        return {size: self._slice(self.pool, size) for size in reversed(self.pool.levels)}

    def _slice(self, pool: SlicedPool, size: Size) -> Arrays:
        row = self.average.copy()
        row[self._trained().stop :] = self.statistics[pool.levels.index(size)]
        return pool.assembled(row, size)

    def state(self) -> State:
        """Return the pool, the queue, the means, the last step, the initial model, a visit's length, the variates."""
        state = super().state()
        state.arrays |= {
            "mean.row": self.mean,
            "mean.integers": self.counters,
            "step.row": self.steps[self._newest],
            "average.row": self.average,
            "origin.row": self.origin,
        }
        if isinstance(self.pool, SlicedPool):
            state.arrays["statistics"] = self.statistics
        state.values["visit"] = self.visit
        state.arrays |= self.variates.state()
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.mean, self.average, self.origin = (
            state.arrays[f"{name}.row"].copy() for name in ("mean", "average", "origin")
        )
        self.steps = np.stack([state.arrays["step.row"], np.zeros_like(self.mean)])
        self._spare, self._newest = np.zeros_like(self.mean), 0
        self.counters = state.arrays["mean.integers"].copy()
        if isinstance(self.pool, SlicedPool):
            self.statistics = state.arrays["statistics"].copy()
        self.visit = float(state.values["visit"])
        self.variates.restore(state.arrays)


def cosine(products: NDArray[np.float64]) -> float:
    """Return the cosine of two vectors, in [-1, 1], from their inner products (2, 2); 0 if one has no length."""
    length = math.sqrt(products[0, 0] * products[1, 1])
    return max(-1.0, min(1.0, float(products[0, 1]) / length)) if length > 0 else 0.0
