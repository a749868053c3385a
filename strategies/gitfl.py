"""GitFL: asynchronous branches that are pulled towards a master, with clients chosen by curiosity and speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fedcross.core.randomness import stream
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.parts.pooled import AsyncPool, AsyncPoolState, PooledParams, mixed
from fedcross.strategies.pool.mixing import Matrix
from fedcross.strategies.pool.pool import Array, Arrays

#: Smallest weight of a client in the draw.
LEAST = 1e-6


class GitFLParams(PooledParams):
    control: float = Field(10.0, gt=0)
    least: float = Field(2.0, gt=0)
    most: float = Field(50.0, gt=0)
    curious: float = Field(0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least={self.least:g} is above most={self.most:g}: give the smaller bound as least")
        return self


@dataclass
class GitFLState(AsyncPoolState):
    """Both pools, their versions, and of each client its ended visits, accepted ones and their mean duration."""

    ended: dict[int, int] = field(default_factory=dict)
    visits: dict[int, int] = field(default_factory=dict)
    durations: dict[int, float] = field(default_factory=dict)


class GitFL(AsyncPool[GitFLParams, GitFLState]):
    """Hu et al., GitFL: Uncertainty-Aware Real-Time Asynchronous Federated Learning, RTSS 2023 (arXiv 2211.12049).

    Slots hold branches b_i with versions n_i, the number of their uploads. The master is ``M = sum_j n_j b_j / sum_j
    n_j``. After its upload, slot i sends ``w_i = (c b_i + M)/(c + 1)`` with ``c = clip(n_i - mean(n) + control, least,
    most)``: a branch that is ahead is pulled less. The global model is M. Equal versions: ``masterpull`` at c/(c + 1).

    The client for slot i is drawn among idle ones with probability proportional to ``max(1e-6, weight)``. With v_u
    ended visits of client u and the mean duration T_u of its accepted ones (0 before the first), curiosity is
    ``1/sqrt(v_u + 1)`` and speed is ``(T_u - mean T)/(10 max T) (n_i - mean n)``, which gives slow clients to branches
    that are ahead. The weight is curiosity at first, later ``a curiosity + (1 - a) speed``, a half the elapsed share.

    State: two pools of K models, visits and durations of each client; clients keep none. Wire: one model down, one up.

    Deviations: the weights are those of the authors' code; the paper's text swaps the two terms. The elapsed share is
    counted in visits, theirs in seconds of a time budget. Lost visits count in v_u. Means and maxima of T are over all
    connected clients. Uploads that arrive together are all counted before any slot is mixed.
    """

    def sample(self, state: GitFLState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        draw = stream(round.seed, "sample", round.number, round.exchange)
        left, found = list(available), list[int]()
        for slot in round.slots:
            weights = np.array([max(LEAST, self.weight(state, round, slot, client)) for client in left])
            found.append(left.pop(int(draw.choice(len(left), p=weights / weights.sum()))))
        return tuple(found)

    def weight(self, state: GitFLState, round: Round, slot: int, client: int) -> float:
        """Return the weight of `client` in the draw for `slot`."""
        curiosity = float(1 / np.sqrt(state.ended.get(client, 0) + 1))
        share = min(sum(state.ended.values()) / (round.rounds * len(state.pool)), 1.0)
        if share < self.params.curious or not state.durations:
            return curiosity
        times = [state.durations.get(one, 0.0) for one in round.budgets]
        ahead = state.versions[slot] - float(np.mean(state.versions))
        longest = max(times, default=0.0) or 1.0  # 0: those that have trained are gone, and others have come
        speed = (state.durations.get(client, 0.0) - float(np.mean(times))) / (10 * longest) * ahead
        return share / 2 * curiosity + (1 - share / 2) * speed

    def aggregate(self, state: GitFLState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        for client in round.clients:
            state.ended[client] = state.ended.get(client, 0) + 1
        for upload in uploads:
            client, before = upload.client, state.durations.get(upload.client, 0.0)
            state.visits[client] = state.visits.get(client, 0) + 1
            state.durations[client] = before + (upload.seconds - before) / state.visits[client]
        return super().aggregate(state, round, uploads)

    def master(self, state: GitFLState) -> Array:
        """Return the weight of each branch in the master (K,); all of them equal before the first upload."""
        versions = np.array(state.versions, np.float64)
        return versions / versions.sum() if versions.any() else np.full(len(versions), 1 / len(versions))

    def mixing(self, state: GitFLState, round: Round, slots: list[int]) -> Matrix:
        mixing, mean, params = np.eye(len(state.pool)), float(np.mean(state.versions)), self.params
        for slot in slots:
            own = min(max(state.versions[slot] - mean + params.control, params.least), params.most)
            mixing[slot] = self.master(state) / (own + 1)
            mixing[slot, slot] += own / (own + 1)
        return mixing

    def global_model(self, state: GitFLState) -> Arrays:
        mixing = np.eye(len(state.pool))
        mixing[0] = self.master(state)
        rows, integers = mixed(state.uploads, mixing, [0])
        return state.pool.arrays(rows[0], integers[0])
