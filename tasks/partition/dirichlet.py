"""Label skew by a Dirichlet distribution, with the procedure of the FedCross and FedCT papers.

For every class: shuffle its examples, draw p ~ Dir(beta * 1_N), set p to zero for the clients that already hold n / N
examples or more, renormalise, and cut the examples at floor(cumsum(p) * count). If a client ends with fewer than
`min_size` examples, everything is drawn again. First used by Yurochkin et al., "Bayesian Nonparametric Federated
Learning of Neural Networks", ICML 2019; the papers cite Hsu et al., arXiv 1909.06335.

``sampler=authors`` draws the same procedure from NumPy's old generator in the order of FedCross's authors, and so gives
their published client sets (repository FedMut of the first author) for CIFAR-10, 100 clients, beta 0.1, 0.5 and 1.0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import DrawParams, drawn


class Params(DrawParams):
    """Settings of the Dirichlet partition; a `beta` of 0.1 is the papers' hardest case.

    Attributes
    ----------
    sampler : {"keyed", "authors"}
        Draws from streams keyed by the run's seed, or those of the FedCross authors, the same for every seed.
    authors_seed : int
        Seed of the authors' generator; their published sets have 1.
    """

    sampler: Literal["keyed", "authors"] = "keyed"
    authors_seed: int = Field(default=1, ge=0, lt=2**32)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint sets of at least ``min_size`` examples, whose union is the training set; or DataError.

    Draw number t uses its own stream, keyed by (seed, t); with ``sampler=authors`` all draws come from one generator.
    """
    y = np.asarray(task.train.y)
    members = [np.flatnonzero(y == label) for label in range(task.classes)]
    authors = np.random.RandomState(params.authors_seed)  # not a global generator

    def draw(attempt: int) -> list[IntArray]:
        keyed = params.sampler == "keyed"
        generator = stream(seed, "partition dirichlet", attempt) if keyed else authors
        return dealt(members, params.clients, params.beta, generator)

    return drawn(params, len(y), draw)


def dealt(
    members: list[IntArray], N: int, beta: float, generator: np.random.Generator | np.random.RandomState
) -> list[IntArray]:
    """Return one draw of N parts; no parts if the clients with room got no probability at all (for a tiny beta)."""
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
            return []
        cuts = (np.cumsum(p / total) * len(m)).astype(np.int64)[:-1]
        for client, piece in enumerate(np.split(order, cuts)):
            parts[client].append(piece)
            sizes[client] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]
