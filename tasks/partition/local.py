"""A real edge client: everything in its own folder or file belongs to it.

The server of such a federation has test examples only; on a device, none to train on is an error when it shall train.
"""

from __future__ import annotations

import numpy as np

from fedcross.core.errors import DataError
from fedcross.core.settings import Settings
from fedcross.tasks.base import Partition, Task


class Params(Settings):
    """No settings."""


def split(params: Params, task: Task, seed: int) -> Partition:  # noqa: ARG001  # nothing to choose, nothing to draw
    """Return one client with everything; a DataError if it cannot be prepared without the other clients' examples."""
    if not task.alone:
        why = f"task {task.name} takes its vocabulary or scale from all clients' examples"
        cure = "Use arrays of token ids (task.vocabulary), or give task.mean and task.std."
        raise DataError(f"partition=local: {why}. {cure}")
    if task.validation is not None:
        raise DataError("task.validation: a device knows only its own examples. Leave it out with partition=local.")
    everything = np.arange(len(task.train))
    everything.flags.writeable = False
    return Partition(train=[everything], test=[np.arange(len(task.test))], own=True)
