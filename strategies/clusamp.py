"""CluSamp: clients are drawn from K distributions made of clusters of similar updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel

Matrix = NDArray[np.floating[Any]]
#: Columns that are multiplied at a time, so that half-precision memory is never widened as a whole.
BLOCK = 1 << 16
MIB = 1 << 20


class CluSampParams(Settings):
    """Distance between clients, weights of the draws, and memory for the clients' last updates."""

    distance: Literal["arccos", "L1", "L2"] = "arccos"
    weighting: Literal["uniform", "examples"] = Field("uniform", description="weight of one draw in the mean")
    memory: Literal["auto", "float32", "float16", "sketch"] = "auto"
    memory_mb: int = Field(1024, ge=1, description="MiB for the updates of all clients, memory=auto")
    sketch: int = Field(4096, ge=16, description="numbers per client, memory=sketch")

    @model_validator(mode="after")
    def _sketch_keeps_angles_only(self) -> CluSampParams:
        if self.distance == "L1" and self.memory == "sketch":
            raise ValueError("a sketch does not keep L1 distances. Use distance=arccos, L2 or memory=float16")
        return self


@dataclass
class CluSampState(ModelState):
    """The global model and the names of its p parameters; of each client seen the update, its scale and n_k.

    ``kind`` is the form in which updates are stored, decided when the number of clients is known; ``times`` says how
    often each client was drawn in this round.
    """

    parameters: tuple[str, ...]
    width: int
    kind: str = ""
    rows: dict[int, Matrix] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)


class CluSamp(SingleModel[CluSampParams, CluSampState]):
    """Fraboni, Vidal, Kameni and Lorenzi, Clustered Sampling: Low-Variance and Improved Representativity for Clients
    Selection in Federated Learning, ICML 2021, Algorithm 2.

    Client i's row is its last update ``v_i = w_i - G`` over the parameters, G the model it was sent; 0 until its first
    visit. Each round:

    1. ``rho_ij = arccos(v_i . v_j / (|v_i| |v_j|))``, 0 if one of them is 0 (as the official code);
       `distance=L1`: ``|v_i - v_j|_1``; `distance=L2`: ``|v_i - v_j|_2^2``, squared as in the official code.
    2. Ward's hierarchical clustering of the rows of rho, which describe a client by its distances to all (as the
       official code; Ward's criterion needs points of a Euclidean space, which angles are not).
    3. Client i has mass ``K n_i``, an urn holds ``M = sum_j n_j``. The tree is cut into its largest subtrees of mass M
       at most, which gives K groups or more. The K heaviest groups open one urn each; the others fill the remaining
       room, urn after urn.
    4. One client is drawn from each urn in proportion to its mass in it, so client i is drawn ``K n_i / M`` times in
       expectation.

    The new global model is ``(1/K) sum over the draws``. A client that is drawn twice gets one request, and its upload
    counts twice; a round then has fewer than K requests, and the metric ``distinct_clients`` is their number.

    State: the global model, and for each client seen the last update and number of examples; clients keep none.
    Wire: one model down, one up.

    Memory: N x p numbers, p the parameters. `memory=auto` keeps them in float32 if all N rows fit into
    `memory_mb`, else in float16 (rows scaled to a largest entry of 1, the scale kept aside), else as count sketches
    (Charikar, Chen and Farach-Colton 2002) of `sketch` numbers: a random signed projection that keeps inner products
    in expectation, with relative error about ``1 / sqrt(sketch)``, but not L1 distances.

    Deviations: the paper knows all n_i beforehand; here they are learned from uploads, and a client not seen yet counts
    as the mean of those seen. A client with ``K n_i >= M`` fits into no urn: it gets urns of its own while it fills
    them, and only the rest of its mass is clustered. Groups are poured from the heaviest down and clients in the
    order of their ids, where the official code goes from the lightest up in random order. Lost clients: the mean is
    over the draws that arrived. `weighting=examples` weights by n_k once more, as the FedCross lab's code does.
    """

    def init(self, start: Start) -> CluSampState:
        """Start with no client seen."""
        width = sum(start.arrays[name].size for name in start.parameters)
        return CluSampState(super().init(start).model, start.parameters, width)

    def sample(self, state: CluSampState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct clients among the K draws, in the order of their first draw."""
        state.kind = state.kind or choose_memory(self.params, len(available), state.width)
        sizes = np.array([state.sizes.get(client, 0) for client in available], np.float64)
        known = [float(size) for size in sizes if size]
        sizes[sizes == 0] = np.mean(known) if known else 1.0
        urns = distributions(ward(self.distances(state, available)), sizes, round.count)
        draws = stream(round.seed, "sample", round.number)
        drawn = [available[draws.choice(len(available), p=urn)] for urn in urns]
        state.times = dict(Counter(drawn))
        return tuple(state.times)

    def dispatch(self, state: CluSampState, round: Round) -> list[Task]:
        """Send the global model; the method is the choice of clients, so no other client may replace a drawn one."""
        return [replace(task, fixed=True) for task in super().dispatch(state, round)]

    def distances(self, state: CluSampState, clients: Sequence[int]) -> Matrix:
        """Return the (n, n) distances of the updates of `clients`."""
        seen = [i for i, client in enumerate(clients) if client in state.rows]
        matrix = np.zeros((len(clients), len(clients)))
        if not seen:
            return matrix
        rows = np.stack([state.rows[clients[i]] for i in seen])
        if self.params.distance == "arccos":
            matrix[np.ix_(seen, seen)] = angles(rows)
            return matrix
        from scipy.spatial.distance import cdist

        measure: Literal["cityblock", "sqeuclidean"] = "cityblock" if self.params.distance == "L1" else "sqeuclidean"
        scales = np.array([state.scales[clients[i]] for i in seen])
        values = rows.astype(np.float64) * scales[:, None]
        matrix[np.ix_(seen, seen)] = cdist(values, values, measure)
        unseen = [i for i in range(len(clients)) if i not in set(seen)]
        lengths = (np.abs(values) if measure == "cityblock" else values**2).sum(1)  # distance to an update of 0
        matrix[np.ix_(seen, unseen)] = lengths[:, None]
        matrix[np.ix_(unseen, seen)] = lengths[None]
        return matrix

    def aggregate(self, state: CluSampState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Store the updates, then average the models over the draws, times n_k if asked for."""
        for upload in uploads:
            update = [
                np.asarray(upload.arrays[n], np.float32).ravel() - state.model[n].ravel() for n in state.parameters
            ]
            row, state.scales[upload.client] = self._compress(state, round.seed, np.concatenate(update))
            state.rows[upload.client], state.sizes[upload.client] = row, upload.num_examples
        examples = self.params.weighting == "examples"
        weights = [float(state.times[u.client] * (u.num_examples if examples else 1)) for u in uploads]
        if uploads:
            state.model = weighted_mean([upload.arrays for upload in uploads], weights)
        return {"distinct_clients": float(len(round.clients))}

    def _compress(self, state: CluSampState, seed: int, update: Matrix) -> tuple[Matrix, float]:
        """Return the stored form of `update` (p,), and the factor that restores its scale."""
        if state.kind == "sketch":
            buckets, signs = projection(seed, self.params.sketch, state.width)
            return np.bincount(buckets, signs * update, self.params.sketch).astype(np.float32), 1.0
        if state.kind == "float16":
            scale = float(np.abs(update).max()) or 1.0
            return (update / scale).astype(np.float16), scale
        return update, 1.0


@lru_cache(maxsize=1)
def projection(seed: int, sketch: int, width: int) -> tuple[NDArray[np.int64], Matrix]:
    """Return the bucket and the sign of each of `width` values in a sketch of `sketch` numbers."""
    draws = stream(seed, "clusamp sketch")
    buckets = draws.integers(0, sketch, width)
    return buckets, draws.integers(0, 2, width).astype(np.float32) * 2 - 1


def choose_memory(params: CluSampParams, clients: int, width: int) -> str:
    """Return the form in which the updates of `clients` clients with `width` parameters are stored."""
    if params.memory != "auto":
        return params.memory
    room = params.memory_mb * MIB
    if clients * width * 4 <= room:
        return "float32"
    return "float16" if clients * width * 2 <= room or params.distance == "L1" else "sketch"


def angles(rows: Matrix) -> Matrix:
    """Return the angles (n, n) between `rows` (n, p) in radians; 0 where a row is 0."""
    gram = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK].astype(np.float64)
        gram += block @ block.T
    lengths = np.sqrt(np.diag(gram))
    products = np.outer(lengths, lengths)
    cosine = np.divide(gram, products, out=np.ones_like(gram), where=products > 0)
    np.fill_diagonal(cosine, 1.0)
    angle: Matrix = np.arccos(np.clip((cosine + cosine.T) / 2, -1.0, 1.0))
    return angle


def ward(matrix: Matrix) -> NDArray[np.int64]:
    """Return the merges of Ward's clustering of the rows of `matrix` (n, n), shape (n-1, 2).

    Numbers below n are the rows, number n+t is the cluster that merge t made.
    """
    if len(matrix) < 2:
        return np.empty((0, 2), np.int64)
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import pdist

    return np.asarray(linkage(pdist(matrix), "ward")[:, :2], np.int64)


def distributions(merges: NDArray[np.int64], sizes: Matrix, count: int) -> Matrix:
    """Return `count` sampling distributions over n clients, shape (count, n): step 3 of :class:`CluSamp`.

    Each row sums to 1; column i sums to ``count * sizes[i] / sum(sizes)``.

    Parameters
    ----------
    merges : int64 array, shape (n-1, 2)
        What :func:`ward` returned.
    sizes : array, shape (n,)
        Numbers of examples, above 0.
    count : int
        K, at most n.
    """
    room = float(sizes.sum())
    mass = count * sizes.astype(np.float64)
    urns: list[dict[int, float]] = []
    for client in np.argsort(-mass, kind="stable"):  # those that fill urns of their own
        while mass[client] >= room * (1 - 1e-12) and len(urns) < count:
            urns.append({int(client): room})
            mass[client] = max(mass[client] - room, 0.0)
    groups = sorted(cut(merges, mass, room), key=lambda group: -mass[group].sum())
    own = len(urns)
    urns += [{client: mass[client] for client in group} for group in groups[: count - own]]
    urns += [{} for _ in range(count - len(urns))]
    current = own
    for client in (client for group in groups[count - own :] for client in group):
        left = float(mass[client])
        while left > 0 and current < count:
            part = min(room - sum(urns[current].values()), left)
            if part > 0:
                urns[current][client] = urns[current].get(client, 0.0) + part
                left -= part
            current += left > 0
    result = np.zeros((count, len(sizes)))
    for row, urn in zip(result, urns):
        row[list(urn)] = list(urn.values())
    shares: Matrix = result / result.sum(1, keepdims=True)
    return shares


def cut(merges: NDArray[np.int64], mass: Matrix, room: float) -> list[list[int]]:
    """Return the largest subtrees whose mass is at most `room`, as sorted lists of clients.

    Clients without mass are left out. Subtrees come in the order of their first client.
    """
    members: list[list[int]] = [[i] if mass[i] > 0 else [] for i in range(len(mass))]
    whole = [True] * len(mass)  # whether the node is a group so far
    for left, right in merges:
        joined = members[left] + members[right]
        fits = bool(whole[left] and whole[right] and mass[joined].sum() <= room * (1 + 1e-12))
        members.append(sorted(joined) if fits else [])
        whole.append(fits)
        if fits:
            members[left], members[right] = [], []
    return sorted(group for group in members if group)
