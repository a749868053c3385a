"""Natural users: a client is a writer, a role or an author of the data set (LEAF)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import owned


class Params(Settings):
    """Settings of natural users.

    Attributes
    ----------
    clients : int or None
        Number of users to draw (without replacement, keyed by the seed); None for all.
    min_samples : int
        Users with fewer examples are left out.
    count : {"train", "all"}
        Which examples `min_samples` counts: those to train on, or the test examples too, as LEAF's ``-k`` counts
        before it splits a user's examples.
    """

    clients: int | None = Field(default=None, ge=1)
    min_samples: int = Field(default=1, ge=1)
    count: Literal["train", "all"] = "train"


def _by_user(users: IntArray | None, count: int) -> list[IntArray]:
    """Return the indices of each user 0..count-1."""
    if users is None or len(users) == 0:
        return [np.empty(0, np.int64)] * count
    order = np.argsort(users, kind="stable")
    return np.split(order, np.searchsorted(np.asarray(users)[order], np.arange(1, count)))


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return one client per chosen user, in the order of the users' numbers, with the user's own test examples.

    The central test set stays the union over all users, as the papers evaluate.

    Raises
    ------
    DataError
        If the task has no users or too few of them have ``min_samples``.
    """
    if task.train.users is None:
        raise DataError(
            f"partition=natural: task {task.name} has no users. Use femnist, shakespeare, sent140, arrays with users "
            "or a table with task.users."
        )
    tests = task.test.users
    count = 1 + max(int(task.train.users.max()), -1 if tests is None or len(tests) == 0 else int(tests.max()))
    train, test = _by_user(task.train.users, count), _by_user(tests, count)
    whole = params.count == "all"
    sizes = [len(own) + (len(held) if whole else 0) for own, held in zip(train, test)]
    eligible = np.array([u for u in range(count) if sizes[u] >= params.min_samples and len(train[u])], dtype=np.int64)
    wanted = len(eligible) if params.clients is None else params.clients
    if wanted > len(eligible) or wanted == 0:
        counted = "examples" if whole else "training examples"
        raise DataError(
            f"partition=natural: {len(eligible)} of {count} users of {task.name} have at least {params.min_samples} "
            f"{counted}, {wanted} are asked for. Lower partition.clients or partition.min_samples."
        )
    chosen = np.sort(stream(seed, "partition natural").permutation(eligible)[:wanted])
    return Partition(
        train=owned([train[user] for user in chosen]), test=None if tests is None else [test[user] for user in chosen]
    )
