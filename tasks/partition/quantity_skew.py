"""Quantity skew: the same distribution for everybody, but sizes drawn from a Dirichlet distribution.

Source: Q. Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
"""

from __future__ import annotations

import numpy as np

from fedcross.core.randomness import stream
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import DrawParams, drawn


class Params(DrawParams):
    """Settings of quantity skew: a small `beta` gives few large and many small clients."""


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint random sets of at least ``min_size`` examples, whose union is the training set."""
    n = len(task.train)

    def draw(attempt: int) -> list[IntArray]:
        generator = stream(seed, "partition quantity_skew", attempt)
        p = generator.dirichlet(np.full(params.clients, params.beta))
        cuts = (np.cumsum(p) * n).astype(np.int64)[:-1]
        return np.split(generator.permutation(n), cuts)

    return drawn(params, n, draw)
