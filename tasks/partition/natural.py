"""Natural users: a client is a writer, a role or an author of the data set (LEAF)."""

from __future__ import annotations

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
        Users with fewer training examples are left out.
    """

    clients: int | None = Field(default=None, ge=1)
    min_samples: int = Field(default=1, ge=1)


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
            f"partition=natural: task {task.name} has no users. Use femnist, shakespeare, sent140 or arrays with users."
        )
    tests = task.test.users
    count = 1 + max(int(task.train.users.max()), -1 if tests is None or len(tests) == 0 else int(tests.max()))
    train = _by_user(task.train.users, count)
    eligible = np.array([user for user in range(count) if len(train[user]) >= params.min_samples], dtype=np.int64)
    wanted = len(eligible) if params.clients is None else params.clients
    if wanted > len(eligible) or wanted == 0:
        raise DataError(
            f"partition=natural: {len(eligible)} of {count} users of {task.name} have at least {params.min_samples} "
            f"training examples, {wanted} are asked for. Lower partition.clients or partition.min_samples."
        )
    chosen = np.sort(stream(seed, "partition natural").permutation(eligible)[:wanted])
    test = _by_user(tests, count)
    return Partition(
        train=owned([train[user] for user in chosen]), test=None if tests is None else [test[user] for user in chosen]
    )
