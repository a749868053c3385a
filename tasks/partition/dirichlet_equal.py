"""Label skew by a Dirichlet distribution with equally many examples for each client, as in FL-SAM's tables.

The shuffled examples are dealt to groups of ten clients. Each group draws :mod:`tasks.partition.dirichlet` among its
clients until each has half of an equal share. The clients' sets, one behind the other, are then cut into equal parts,
so that neighbours may share a label. The same steps as harrylee999/FL-SAM, from this project's generators.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import ClientsParams, DrawParams, drawn, enough, owned
from fedcross.tasks.partition.dirichlet import dealt

#: Clients of a group.
GROUP = 10


class Params(ClientsParams):
    """Settings of the partition.

    Attributes
    ----------
    beta : float
        Concentration of the Dirichlet distribution, above 0: small is skewed, large is even.
    max_draws : int
        Draws of a group before it gives up.
    """

    beta: float = Field(default=0.5, gt=0)
    max_draws: int = Field(default=10_000, ge=1)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint sets of equal size (to one example), whose union is the training set; or DataError."""
    y, clients = np.asarray(task.train.y), params.clients
    enough(len(y), clients, 1)
    order = stream(seed, "partition dirichlet_equal").permutation(len(y))
    found: list[IntArray] = []
    for group, first in enumerate(range(0, clients, GROUP)):
        count = min(GROUP, clients - first)
        rows = order[first * len(y) // clients : (first + count) * len(y) // clients]
        members = [rows[y[rows] == label] for label in range(task.classes)]
        half = max(1, math.floor(0.5 * len(rows) / count))
        wanted = DrawParams(clients=count, beta=params.beta, min_size=half, max_draws=params.max_draws)

        def draw(
            attempt: int, group: int = group, members: list[IntArray] = members, count: int = count
        ) -> list[IntArray]:
            return dealt(members, count, params.beta, stream(seed, "partition dirichlet_equal", group, attempt))

        found += drawn(wanted, len(rows), draw).train
    return Partition(train=owned(np.array_split(np.concatenate(found), clients)))
