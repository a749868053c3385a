"""One client's own data, loaded once per process and shared by all clients in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import RunConfig
from tasks.base import Partition, Task
from tasks.errors import DataError


@dataclass(frozen=True)
class FederatedData:
    """A loaded task and who owns what of it."""

    task: Task
    partition: Partition

    def client(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the prepared inputs (n, ...) and labels (n,) of client `index` on `device`.

        Raises
        ------
        DataError
            If there is no such client or it owns nothing.
        """
        if not 0 <= index < len(self.partition):
            raise DataError(f"client {index}: the partition has clients 0 to {len(self.partition) - 1}.")
        indices = self.partition.train[index]
        if len(indices) == 0:
            raise DataError(f"client {index} owns no examples. Use another partition or fewer clients.")
        raw = self.task.train.x[indices]
        if self.partition.transform is not None:
            raw = self.partition.transform(index, raw)
        labels = torch.from_numpy(self.task.train.y[indices])
        return self.task.prepare(raw).to(device), labels.to(device)


def load(config: RunConfig) -> FederatedData:
    """Load the configured task and partition it."""
    task: Task = config.module("task").load(config.task)
    partition: Partition = config.module("partition").split(config.partition, task, config.seed)
    return FederatedData(task, partition)
