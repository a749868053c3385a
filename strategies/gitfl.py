"""GitFL: asynchronous branches that are pulled towards a master, with clients chosen by curiosity and speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fedcross.core.randomness import stream
from fedcross.strategies.asynchronous.pool import AsyncPool, mixed
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.pool.mixing import Mixing, identity
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.pooled import PooledParams
from fedcross.strategies.wire.protocol import Round

#: Smallest weight of a client in the draw.
LEAST = 1e-6


class GitFLParams(PooledParams):
    """Settings of GitFL, beside those of every pool.

    Parameters
    ----------
    control : float
        Weight of a branch of average version, beside the master's weight 1.
    least, most : float
        Bounds of that weight.
    curious : float
        Share of the run's visits in which clients are chosen by curiosity alone.
    """

    control: float = Field(10.0, gt=0)
    least: float = Field(2.0, gt=0)
    most: float = Field(50.0, gt=0)
    curious: float = Field(0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least={self.least:g} is above most={self.most:g}: give the smaller bound as least")
        return self


class GitFL(AsyncPool[GitFLParams]):
    """Hu et al., GitFL: Uncertainty-Aware Real-Time Asynchronous Federated Learning, RTSS 2023 (arXiv 2211.12049).

    Slots hold branches b_i with versions n_i, the number of their uploads. The master is ``M = sum_j n_j b_j / sum_j
    n_j``. After its upload, slot i sends ``w_i = (c b_i + M)/(c + 1)`` with ``c = clip(n_i - mean(n) + control, least,
    most)``: a branch that is ahead is pulled less. The global model is M. With equal versions this is ``masterpull``
    with alpha = control/(control + 1).

    The client for slot i is drawn among idle ones with probability proportional to ``max(1e-6, weight)``. With v_u
    visits of client u that have ended and the mean duration T_u of its accepted ones (0 before the first), curiosity is
    ``1/sqrt(v_u + 1)`` and speed is ``(T_u - mean T)/(10 max T) (n_i - mean n)``, which gives slow clients to branches
    that are ahead. The weight is the curiosity at first, later ``a curiosity + (1 - a) speed`` with a = half of the
    elapsed share of the run. Theirs knows no lost visits; here they count in v_u, or else a client that never brings
    anything would stay as curious as a new one while all others' curiosity falls.

    State: two pools of K models, visits and durations of each client seen; clients keep none. Wire: one model down, one
    up.

    Choices and deviations: these weights are those of the authors' code; the paper's text has the roles of the two
    terms the other way round. The elapsed share is counted in visits, theirs in seconds of a time budget. Means and
    maxima of T are over all connected clients. Uploads that arrive together are all counted before any slot is mixed.
    """

    def setup(self, arrays: Arrays) -> None:
        """Fill the pools; nobody has been visited."""
        super().setup(arrays)
        self.visits: Counter[int] = Counter()
        self.durations: dict[int, float] = {}

    def choose(self, number: int, group: int, slots: Sequence[int], idle: Sequence[int]) -> list[int]:
        """Draw a client for each slot, one after another, by curiosity and speed."""
        draw = stream(self.federation.seed, "sample", number, group)
        left, found = list(idle), list[int]()
        for slot in slots:
            weights = np.array([max(LEAST, self.weight(slot, client)) for client in left])
            chosen = left.pop(int(draw.choice(len(left), p=weights / weights.sum())))
            found.append(chosen)
        return found

    def weight(self, slot: int, client: int) -> float:
        """Return the weight of `client` in the draw for `slot`."""
        curiosity = float(1 / np.sqrt(self.visits[client] + self.lead.lost[client] + 1))
        share = min(self.finished / (self.federation.rounds * self.slots), 1.0)
        if share < self.params.curious or not self.durations:
            return curiosity
        times = [self.durations.get(one, 0.0) for one in self._available]
        ahead = self.versions[slot] - float(np.mean(self.versions))
        longest = max(times, default=0.0) or 1.0  # 0: those that have trained are gone, and others have come
        speed = (self.durations.get(client, 0.0) - float(np.mean(times))) / (10 * longest) * ahead
        return share / 2 * curiosity + (1 - share / 2) * speed

    def timed(self, client: int, seconds: float) -> None:
        """Update the client's mean duration."""
        self.visits[client] += 1
        before = self.durations.get(client, 0.0)
        self.durations[client] = before + (seconds - before) / self.visits[client]

    def master(self) -> Mapping[int, float]:
        """Return the weight of each branch in the master; all of them equal before the first upload."""
        total = sum(self.versions)
        if not total:
            return dict.fromkeys(range(self.slots), 1 / self.slots)
        return {slot: version / total for slot, version in enumerate(self.versions) if version}

    def mixing(self, current: Round, slots: list[int]) -> tuple[Mixing, dict[str, float]]:
        """Pull the branches of `slots` towards the master."""
        master, mean, params = self.master(), float(np.mean(self.versions)), self.params
        rows = list(identity(self.slots).rows)
        for slot in slots:
            own = min(max(self.versions[slot] - mean + params.control, params.least), params.most)
            row = {j: weight / (own + 1) for j, weight in master.items()}
            row[slot] = row.get(slot, 0.0) + own / (own + 1)
            rows[slot] = row
        return Mixing(tuple(rows)), {}

    def global_model(self) -> Arrays:
        """Return the master."""
        rows = list(identity(self.slots).rows)
        rows[0] = self.master()
        floats, integers = mixed(self.uploads, Mixing(tuple(rows)), [0])
        return self.pool.layout.views(floats[0], integers[0])

    def state(self) -> State:
        """Return the pools, and visits and durations of the clients."""
        state = super().state()
        state.values["visits"] = {str(client): count for client, count in sorted(self.visits.items())}
        state.values["durations"] = {str(client): mean for client, mean in sorted(self.durations.items())}
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.visits = Counter({int(client): int(count) for client, count in state.values["visits"].items()})
        self.durations = {int(client): float(mean) for client, mean in state.values["durations"].items()}
