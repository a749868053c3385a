"""CluSamp: clients are drawn from K distributions made of clusters of similar updates."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist, pdist

from fedcross.core.randomness import stream
from fedcross.strategies.method import Round, Settings, Task, Upload
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all

Matrix = NDArray[np.floating[Any]]
BLOCK = 1 << 16  # Columns that are multiplied at a time in float64, so that rows are never widened as a whole.
ROUNDING = 1e-12  # Relative error allowed where masses are compared with an urn's room.


class CluSampParams(Settings):
    distance: Literal["arccos", "L1", "L2"] = "arccos"
    weighting: Literal["uniform", "examples"] = "uniform"
    sketch: int | None = Field(None, ge=16)

    @model_validator(mode="after")
    def _sketch_keeps_angles_only(self) -> Self:
        if self.distance == "L1" and self.sketch:
            raise ValueError("a sketch does not keep L1 distances. Use distance=arccos or L2")
        return self


@dataclass
class CluSampState(ModelState):
    """The global model; of each client seen the update (its row) and n_k; each client's draws of this round."""

    rows: dict[int, Matrix] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)


class CluSamp(SingleModel[CluSampParams, CluSampState]):
    """Fraboni, Vidal, Kameni and Lorenzi, Clustered Sampling: Low-Variance and Improved Representativity for Clients
    Selection in Federated Learning, ICML 2021, Algorithm 2.

    Client i's row is its last update ``v_i = w_i - G``, G the model it was sent; 0 until its first visit. Each round:

    1. ``rho_ij = arccos(v_i . v_j / (|v_i| |v_j|))``, 0 if one of them is 0; `distance=L1`: ``|v_i - v_j|_1``;
       `distance=L2`: ``|v_i - v_j|_2^2``. All as the official code.
    2. Ward's hierarchical clustering of the rows of rho (as the official code; angles are no Euclidean distances).
    3. Client i has mass ``K n_i``, an urn holds ``M = sum_j n_j``. The tree is cut into its largest subtrees of mass M
       at most. The K heaviest open one urn each; the others fill the remaining room, urn after urn.
    4. One client is drawn from each urn in proportion to its mass in it: client i ``K n_i / M`` times in expectation.

    The new global model is ``(1/K) sum over the draws``. A client that is drawn twice gets one request, and its upload
    counts twice. State: the global model, and of each client seen n_k and the last update, with `sketch` numbers as a
    count sketch (Charikar, Chen and Farach-Colton 2002), with relative error of inner products about
    ``1 / sqrt(sketch)``. Wire: FedAvg's.

    Deviations: the paper knows all n_i; here uploads tell them, and a client not seen yet counts as the mean of those
    seen. A client with ``K n_i >= M`` gets urns of its own while it fills them. Groups are poured from the heaviest
    down and clients by id, in the official code from the lightest up in random order. The mean is over the draws that
    arrived. `weighting=examples` weights by n_k once more, as the FedCross lab.
    """

    def sample(self, state: CluSampState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct clients among the K draws, in the order of their first draw."""
        sizes = np.array([state.sizes.get(client, 0) for client in available], np.float64)
        sizes[sizes == 0] = np.mean(sizes[sizes > 0]) if sizes.any() else 1.0
        urns = distributions(ward(self.distances(state, available)), sizes, round.count)
        draws = stream(round.seed, "sample", round.number)
        state.times = dict(Counter(available[draws.choice(len(available), p=urn)] for urn in urns))
        return tuple(state.times)

    def dispatch(self, state: CluSampState, round: Round) -> list[Task]:
        return to_all(state.model, round, fixed=True)  # no other client may replace a drawn one

    def distances(self, state: CluSampState, clients: Sequence[int]) -> Matrix:
        """Return the (n, n) distances of the updates of `clients`; the update of a client not seen is 0."""
        nothing = np.zeros_like(next(iter(state.rows.values()), np.zeros(1)))
        rows = np.stack([state.rows.get(client, nothing) for client in clients])
        if self.params.distance == "arccos":
            return angles(rows)
        measure = "cityblock" if self.params.distance == "L1" else "sqeuclidean"
        return np.asarray(cdist(rows, rows, measure), np.float64)

    def aggregate(self, state: CluSampState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        for upload in uploads:
            update = [np.float32(upload.arrays[n]).ravel() - state.model[n].ravel() for n in state.parameters]
            state.rows[upload.client] = self.stored(round.seed, np.concatenate(update))
            state.sizes[upload.client] = upload.num_examples
        weights = [state.times[upload.client] * weight for upload, weight in zip(uploads, self.weights(uploads))]
        if uploads:
            state.model = weighted_mean([upload.arrays for upload in uploads], weights)
        return {"distinct_clients": float(len(round.clients))}

    def stored(self, seed: int, update: Matrix) -> Matrix:
        """Return `update` (p,), or its sketch, as float32."""
        if size := self.params.sketch:
            buckets, signs = projection(seed, size, len(update))
            return np.bincount(buckets, signs * update, size).astype(np.float32)
        return update.astype(np.float32)


@lru_cache(maxsize=1)
def projection(seed: int, sketch: int, width: int) -> tuple[NDArray[np.int64], Matrix]:
    """Return the bucket and the sign of each of `width` values in a sketch of `sketch` numbers."""
    draws = stream(seed, "clusamp sketch")
    buckets = draws.integers(0, sketch, width)
    return buckets, draws.integers(0, 2, width).astype(np.float32) * 2 - 1


def angles(rows: Matrix) -> Matrix:
    """Return the angles (n, n) between `rows` (n, p) in radians; 0 where a row is 0."""
    gram = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK].astype(np.float64)
        gram += block @ block.T
    products = np.outer(np.sqrt(np.diag(gram)), np.sqrt(np.diag(gram)))
    cosine = np.divide(gram, products, out=np.ones_like(gram), where=products > 0)
    np.fill_diagonal(cosine, 1.0)
    angle: Matrix = np.arccos(np.clip((cosine + cosine.T) / 2, -1.0, 1.0))
    return angle


def ward(matrix: Matrix) -> Matrix:
    """Return Ward's clustering of the rows of `matrix` (n, n) as ``scipy.cluster.hierarchy`` does, shape (n-1, 4)."""
    return linkage(pdist(matrix), "ward") if len(matrix) > 1 else np.empty((0, 4))


def distributions(tree: Matrix, sizes: Matrix, count: int) -> Matrix:
    """Return K = `count` sampling distributions over n clients, shape (K, n): step 3 of :class:`CluSamp`.

    Each row sums to 1; column i sums to ``K sizes[i] / sum(sizes)``. `tree` (n-1, 4) is what :func:`ward` returned,
    `sizes` (n,) are numbers of examples above 0.
    """
    room, mass, urns = float(sizes.sum()), count * sizes.astype(np.float64), np.zeros((count, len(sizes)))
    full = np.floor(mass / room * (1 + ROUNDING)).astype(int)  # urns that a client fills alone
    heaviest = np.argsort(-mass, kind="stable")
    alone = np.repeat(heaviest, full[heaviest])
    urns[np.arange(len(alone)), alone] = room
    mass = np.maximum(mass - full * room, 0.0)
    groups = sorted(cut(tree, mass, room), key=lambda group: -mass[group].sum())
    opening = count - len(alone)
    for urn, group in zip(urns[len(alone) :], groups):
        urn[group] = mass[group]
    # The others stand in a line, as long as the free room of all urns: each gets what lies beside it.
    rest = [client for group in groups[opening:] for client in group]
    clients, free = np.cumsum([0.0, *mass[rest]]), np.cumsum([0.0, *(room - urns.sum(1))])
    beside = np.minimum(free[1:, None], clients[1:]) - np.maximum(free[:-1, None], clients[:-1])
    urns[:, rest] += np.maximum(beside, 0.0)
    shares: Matrix = urns / urns.sum(1, keepdims=True)
    return shares


def cut(tree: Matrix, mass: Matrix, room: float) -> list[list[int]]:
    """Return the largest subtrees of mass `room` at most, as sorted lists of the clients with mass, the first first."""
    total, labels = list(mass), np.zeros(len(mass))
    for left, right in tree[:, :2].astype(int):
        total.append(total[left] + total[right])
    if len(tree):
        labels = fcluster(tree, room * (1 + ROUNDING), "monocrit", monocrit=np.array(total[len(mass) :], np.float64))
    groups = [np.flatnonzero((labels == label) & (mass > 0)).tolist() for label in np.unique(labels)]
    return sorted(group for group in groups if group)
