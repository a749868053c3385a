"""Natural users: a client is a writer, a role or an author of the data set (LEAF)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.tasks.base import Partition, Task
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
        Which examples that counts: those to train on, or the test examples too, as LEAF's ``-k`` does.
    """

    clients: int | None = Field(default=None, ge=1)
    min_samples: int = Field(default=1, ge=1)
    count: Literal["train", "all"] = "train"


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return one client per chosen user, in the order of the users' numbers, with the user's own test examples.

    The central test set stays the union over all users, as the papers evaluate.
    """
    if task.train.users is None:
        cure = "Use femnist, shakespeare, sent140, arrays with users or a table with task.users."
        raise DataError(f"partition=natural: task {task.name} has no users. {cure}")
    tests = np.empty(0, np.int64) if task.test.users is None else np.asarray(task.test.users)
    owners = [np.asarray(task.train.users), tests]
    count = 1 + int(np.concatenate(owners).max(initial=-1))
    sizes = [np.bincount(users, minlength=count) for users in owners]
    counted = sizes[0] + (sizes[1] if params.count == "all" else 0)
    eligible = np.flatnonzero((counted >= params.min_samples) & (sizes[0] > 0))
    wanted = len(eligible) if params.clients is None else params.clients
    if wanted > len(eligible) or wanted == 0:
        found = f"{len(eligible)} of {count} users of {task.name} have at least {params.min_samples} examples"
        cure = "Lower partition.clients or partition.min_samples."
        raise DataError(f"partition=natural: {found}, {wanted} are asked for. {cure}")
    chosen = np.sort(stream(seed, "partition natural").permutation(eligible)[:wanted])
    rows = [np.split(np.argsort(u, kind="stable"), np.cumsum(n)[:-1]) for u, n in zip(owners, sizes)]
    return Partition(
        train=owned([rows[0][user] for user in chosen]),
        test=None if task.test.users is None else [rows[1][user] for user in chosen],
        names=[task.user_names[user] for user in chosen] if task.user_names else (),
    )
