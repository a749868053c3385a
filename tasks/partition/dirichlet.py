"""Label skew by a Dirichlet distribution, with the procedure of the FedCross and FedCT papers.

For every class: shuffle its examples, draw p ~ Dir(beta * 1_N), set p to zero for the clients that already hold n / N
examples or more, renormalise, and cut the examples at floor(cumsum(p) * count). If a client ends with fewer than
`min_size` examples, everything is drawn again. First used by Yurochkin et al., "Bayesian Nonparametric Federated
Learning of Neural Networks", ICML 2019; the papers cite Hsu et al., arXiv 1909.06335.

``sampler=authors`` draws the same procedure from NumPy's old generator in the order of FedCross's authors, and so gives
their published client sets (repository FedMut of the first author) for CIFAR-10, 100 clients, beta 0.1, 0.5 and 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import ClientsParams, enough, owned


class Params(ClientsParams):
    """Settings of the Dirichlet partition.

    Attributes
    ----------
    beta : float
        Concentration, above 0: small is skewed (0.1 is the papers' hardest case), large is even.
    min_size : int
        Smallest number of examples a client may hold.
    max_draws : int
        Give up after this many draws of the whole partition.
    sampler : {"keyed", "authors"}
        ``keyed``: draws from streams keyed by the run's seed. ``authors``: those of the FedCross authors, the same for
        every seed of the run.
    authors_seed : int
        Seed of the authors' generator; their published sets have 1.
    """

    beta: float = Field(default=0.5, gt=0)
    min_size: int = Field(default=10, ge=1)
    max_draws: int = Field(default=1000, ge=1)
    sampler: Literal["keyed", "authors"] = "keyed"
    authors_seed: int = Field(default=1, ge=0, lt=2**32)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint sets, each of at least ``min_size`` examples, whose union is the training set.

    Draw number t uses its own stream, keyed by (seed, t); with ``sampler=authors`` all draws come from one generator.

    Raises
    ------
    DataError
        If there are fewer than N * min_size examples, or no draw of ``max_draws`` leaves everybody enough.
    """
    y = np.asarray(task.train.y)
    enough(len(y), params.clients, params.min_size)
    members = [np.flatnonzero(y == label) for label in range(task.classes)]
    best = 0
    for generator in _generators(params, seed):
        parts = _draw(members, params.clients, params.beta, generator)
        if parts is None:
            continue
        smallest = min(len(part) for part in parts)
        if smallest >= params.min_size:
            return Partition(train=owned(parts))
        best = max(best, smallest)
    raise DataError(
        f"dirichlet: {params.max_draws} draws with beta={params.beta} gave no partition of {len(y)} examples over "
        f"{params.clients} clients with at least {params.min_size} each (best: {best}). "
        "Lower partition.clients or partition.min_size, or raise partition.beta."
    )


def _generators(params: Params, seed: int) -> Iterator[np.random.Generator | np.random.RandomState]:
    """Yield what each draw is made from."""
    authors = np.random.RandomState(params.authors_seed)  # not a global generator
    for attempt in range(params.max_draws):
        yield authors if params.sampler == "authors" else stream(seed, "partition dirichlet", attempt)


def _draw(
    members: list[IntArray], N: int, beta: float, generator: np.random.Generator | np.random.RandomState
) -> list[IntArray] | None:
    """Draw once; None if the clients with room got no probability at all (possible for tiny beta)."""
    n = sum(len(m) for m in members)
    parts: list[list[IntArray]] = [[] for _ in range(N)]
    sizes = np.zeros(N, np.int64)
    for m in members:
        if len(m) == 0:
            continue
        order = generator.permutation(m)
        p = generator.dirichlet(np.full(N, beta))
        p[sizes >= n / N] = 0.0
        total = p.sum()
        if not total > 0.0:
            return None
        cuts = (np.cumsum(p / total) * len(m)).astype(np.int64)[:-1]
        for client, piece in enumerate(np.split(order, cuts)):
            parts[client].append(piece)
            sizes[client] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]
