"""Equal sets: the examples are shuffled and dealt out, so that every client sees the same distribution."""

from __future__ import annotations

import numpy as np

from fedcross.core.randomness import stream
from fedcross.tasks.base import Partition, Task
from fedcross.tasks.partition._common import ClientsParams, enough, owned


class Params(ClientsParams):
    """Settings: the number of clients."""


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint sets whose sizes differ by one at most and whose union is the training set.

    The test set is dealt out likewise: each client's own test part, as FedFusion's public code has it.
    """
    n = len(task.train)
    enough(n, params.clients, 1)
    order = stream(seed, "partition iid").permutation(n)
    held = stream(seed, "partition iid test").permutation(len(task.test))
    return Partition(
        train=owned(np.array_split(order, params.clients)),
        test=[np.sort(part) for part in np.array_split(held, params.clients)],
    )
