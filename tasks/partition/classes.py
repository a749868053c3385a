"""Given classes: each client holds the classes that are listed for it, for example even and odd digits.

Source: FedFusion (Yao et al., ICIP 2019), "artificial non-IID": MNIST over two clients, one with the even digits and
one with the odd ones.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import owned


class Params(Settings):
    """Settings of given classes: one client per entry of `groups`, with its labels.

    Clients that name the same label share its examples equally. Labels in no group are left out.
    """

    groups: tuple[tuple[int, ...], ...] = Field(min_length=1)


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return one client per group; a client's test set is every test example of its labels."""
    for client, group in enumerate(params.groups):
        if len(set(group)) != len(group) or not set(group) <= set(range(task.classes)):
            wanted = f"labels in 0..{task.classes - 1}, each once"
            raise ConfigError(f"partition.groups[{client}]={list(group)}: it must have {wanted}.")
    parts: list[list[IntArray]] = [[np.empty(0, np.int64)] for _ in params.groups]
    for label in range(task.classes):
        holders = [client for client, group in enumerate(params.groups) if label in group]
        if holders:
            members = np.flatnonzero(np.asarray(task.train.y) == label)
            order = stream(seed, "partition classes", label).permutation(members)
            for client, piece in zip(holders, np.array_split(order, len(holders))):
                parts[client].append(piece)
    test = [np.flatnonzero(np.isin(task.test.y, group)) for group in params.groups]
    return Partition(train=owned([np.concatenate(pieces) for pieces in parts]), test=test)
