"""CluSamp: clients are drawn from K distributions made of clusters of similar updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.defence.rules import lower_median
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import Arrays

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


class CluSamp(SingleModel[CluSampParams]):
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

    #: The method is the choice of clients, so no other client may replace a drawn one.
    interchangeable = False

    def setup(self, arrays: Arrays) -> None:
        """Start with no client seen."""
        super().setup(arrays)
        self.width = sum(arrays[name].size for name in self.parameter_names)
        self.kind = ""  # float32, float16 or sketch; decided when the number of clients is known
        self.rows: dict[int, Matrix] = {}
        self.scales: dict[int, float] = {}
        self.sizes: dict[int, int] = {}
        self.times: Counter[int] = Counter()
        self._projection: tuple[NDArray[np.int64], Matrix] | None = None

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Return the distinct clients among the K draws, in the order of their first draw."""
        count = min(self.federation.clients_per_round, len(available))
        self.kind = self.kind or choose_memory(self.params, len(available), self.width)
        sizes = np.array([self.sizes.get(client, 0) for client in available], np.float64)
        known = [float(size) for size in sizes if size]
        sizes[sizes == 0] = np.mean(known) if known else 1.0
        if known and self._defending:  # a round's own limit is that of its few clients
            sizes = np.minimum(sizes, self.federation.defence.weight * lower_median(known))
        urns = distributions(ward(self.distances(available)), sizes, count)
        draws = stream(self.federation.seed, "sample", number)
        self.times = Counter(available[draws.choice(len(available), p=urn)] for urn in urns)
        return tuple(self.times)

    def distances(self, clients: Sequence[int]) -> Matrix:
        """Return the (n, n) distances of the updates of `clients`."""
        seen = [i for i, client in enumerate(clients) if client in self.rows]
        matrix = np.zeros((len(clients), len(clients)))
        if not seen:
            return matrix
        rows = np.stack([self.rows[clients[i]] for i in seen])
        if self.params.distance == "arccos":
            matrix[np.ix_(seen, seen)] = angles(rows)
            return matrix
        from scipy.spatial.distance import cdist

        measure: Literal["cityblock", "sqeuclidean"] = "cityblock" if self.params.distance == "L1" else "sqeuclidean"
        scales = np.array([self.scales[clients[i]] for i in seen])
        values = rows.astype(np.float64) * scales[:, None]
        matrix[np.ix_(seen, seen)] = cdist(values, values, measure)
        unseen = [i for i in range(len(clients)) if i not in set(seen)]
        lengths = (np.abs(values) if measure == "cityblock" else values**2).sum(1)  # distance to an update of 0
        matrix[np.ix_(seen, unseen)] = lengths[:, None]
        matrix[np.ix_(unseen, seen)] = lengths[None]
        return matrix

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Store the updates, then average the models over the draws."""
        for upload in uploads:
            update = [
                np.asarray(upload.arrays[n], np.float32).ravel() - self.model[n].ravel() for n in self.parameter_names
            ]
            self.rows[upload.client], self.scales[upload.client] = self._compress(np.concatenate(update))
            self.sizes[upload.client] = upload.num_examples
        super().aggregate(current, uploads)
        return {"distinct_clients": float(len(current.clients))}

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return how often each client was drawn (times n_k if asked for)."""
        examples = self.params.weighting == "examples"
        return [float(self.times[u.client] * (u.num_examples if examples else 1)) for u in uploads]

    def _compress(self, update: Matrix) -> tuple[Matrix, float]:
        """Return the stored form of `update` (p,), and the factor that restores its scale."""
        if self.kind == "sketch":
            if self._projection is None:
                draws = stream(self.federation.seed, "clusamp sketch")
                buckets = draws.integers(0, self.params.sketch, self.width)
                self._projection = buckets, draws.integers(0, 2, self.width).astype(np.float32) * 2 - 1
            buckets, signs = self._projection
            return np.bincount(buckets, signs * update, self.params.sketch).astype(np.float32), 1.0
        if self.kind == "float16":
            scale = float(np.abs(update).max()) or 1.0
            return (update / scale).astype(np.float16), scale
        return update, 1.0

    def state(self) -> State:
        """Return the model, and row, scale and size of each client seen."""
        state = super().state()
        seen = sorted(self.rows)
        if seen:
            state.arrays["updates"] = np.stack([self.rows[client] for client in seen])
            state.arrays["scales"] = np.array([self.scales[client] for client in seen])
        state.values |= {"seen": seen, "sizes": [self.sizes[client] for client in seen], "kind": self.kind}
        return state

    def restore(self, state: State) -> None:
        """Take over what :meth:`state` returned."""
        super().restore(state)
        seen = [int(client) for client in state.values["seen"]]
        self.kind = str(state.values["kind"])
        self.sizes = dict(zip(seen, (int(size) for size in state.values["sizes"])))
        self.rows = {client: state.arrays["updates"][i] for i, client in enumerate(seen)}
        self.scales = {client: float(state.arrays["scales"][i]) for i, client in enumerate(seen)}


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
