"""Equal sets: the examples are shuffled and dealt out, so that every client sees the same distribution."""

from __future__ import annotations

import numpy as np

from tasks.base import Partition, Task
from tasks.partition._common import ClientsParams, enough, owned
from tasks.randomness import stream


class Params(ClientsParams):
    """Settings: the number of clients."""


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint sets whose sizes differ by one at most and whose union is the training set."""
    n = len(task.train)
    enough(n, params.clients, 1)
    order = stream(seed, "partition iid").permutation(n)
    return Partition(train=owned(np.array_split(order, params.clients)))
