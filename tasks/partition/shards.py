"""Label skew by shards: the examples, sorted by label, are cut into equal pieces and every client gets a few.

Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedcross.core.randomness import stream
from fedcross.tasks.base import Partition, Task
from fedcross.tasks.partition._common import ClientsParams, enough, owned


class Params(ClientsParams):
    """Settings of shards.

    Attributes
    ----------
    classes_per_client : int
        Shards for each client; where the shard size divides the class sizes, at most this many labels.
    """

    classes_per_client: int = Field(default=2, ge=1)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return N disjoint sets of ``classes_per_client`` shards each, whose union is the training set.

    The order within a class and the dealing of the shards are random; shard sizes differ by one at most.
    """
    n, per = len(task.train), params.classes_per_client
    enough(n, params.clients, per)
    generator = stream(seed, "partition shards")
    shuffled = generator.permutation(n)
    by_label = shuffled[np.argsort(np.asarray(task.train.y)[shuffled], kind="stable")]
    shards = np.array_split(by_label, params.clients * per)
    dealt = generator.permutation(len(shards)).reshape(params.clients, per)
    return Partition(train=owned([np.concatenate([shards[i] for i in hand]) for hand in dealt]))
