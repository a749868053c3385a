"""A task and its partition over clients, loaded once per process and shared by all clients in the process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.settings import Settings
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.reading.params import stratified

#: Bytes digested at once, and of a larger array in all: blocks spread evenly over it.
BLOCK, MOST_BYTES = 1 << 22, 1 << 30


@dataclass(frozen=True)
class FederatedData:
    """A loaded task and its partition over clients."""

    task: Task
    partition: Partition

    @cached_property
    def digests(self) -> dict[str, str]:
        """What :func:`digests` returns for the task; computed once."""
        return digests(self.task)

    @property
    def central(self) -> Tensor:
        """The prepared inputs of the central test set, (n, ...)."""
        raw = self.task.test.x
        if self.partition.test_transform is not None:
            raw = self.partition.test_transform(np.arange(len(self.task.test)), np.asarray(raw))
        return self.task.prepare(raw)

    @property
    def validation(self) -> tuple[Tensor, Tensor] | None:
        """The prepared inputs (n, ...) and labels (n,) that no client has; None without ``task.validation``."""
        held = self.task.validation
        return None if held is None else (self.task.prepare(held.x), torch.from_numpy(held.y))

    def client(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all prepared inputs (n, ...) and labels (n,) of client `index` on `device`; see :meth:`inputs`."""
        inputs, labels = self.inputs(index, device)
        return inputs[:], labels

    def inputs(self, index: int, device: torch.device) -> tuple[Inputs, Tensor]:
        """Return inputs and labels (n,) of client `index` on `device`; a DataError if it does not exist or has none."""
        index, parts = 0 if self.partition.own else index, self.partition.train
        if not 0 <= index < len(parts):
            raise DataError(f"client {index}: the partition has clients 0 to {len(parts) - 1}.")
        if len(parts[index]) == 0:
            raise DataError(f"client {index} owns no training examples. Give it some, or use another partition.")
        return self._given([(index, parts[index])], device)

    def _given(self, rows: Sequence[tuple[int, IntArray]], device: torch.device) -> tuple[Inputs, Tensor]:
        """Return training inputs as each of some clients sees them, with labels: (client, indices) each."""
        raw = [self._seen(client, self.task.train.x[indices]) for client, indices in rows]
        labels = torch.from_numpy(np.concatenate([self.task.train.y[indices] for _, indices in rows]))
        inputs = Inputs.of(raw[0] if len(raw) == 1 else np.concatenate(raw), self.task.prepare, device)
        return inputs, labels.to(device)

    def _seen(self, client: int, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return raw if self.partition.transform is None else self.partition.transform(client, raw)

    def union(
        self, share: float, generator: np.random.Generator, device: torch.device, most: int | None = None
    ) -> tuple[Inputs, Tensor]:
        """Return inputs and labels drawn without replacement from what all clients own together, for references only.

        `share` in (0, 1] (at least one example) refers to the sum of the clients' numbers of examples, where one counts
        at most `most` (``train.examples``). The examples come in the order of the clients. A DataError says that this
        process knows its own data only.
        """
        if self.partition.own:
            raise DataError("This device has its own data only, the method needs everybody's. Run it as a simulation.")
        sizes = [len(part) for part in self.partition.train]
        count = max(1, round(share * sum(min(size, most or size) for size in sizes)))
        chosen = np.sort(generator.permutation(sum(sizes))[:count])
        owner = np.searchsorted(np.cumsum(sizes), chosen, side="right")
        starts = np.cumsum([0, *sizes[:-1]])
        rows = [(int(c), self.partition.train[c][chosen[owner == c] - starts[c]]) for c in np.unique(owner)]
        return self._given(rows, device)

    def client_test(self, index: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the test inputs and labels that client `index` owns, in its own view; None if it has none."""
        index = 0 if self.partition.own else index
        if self.partition.test is None or len(self.partition.test[index]) == 0:
            return None
        indices = self.partition.test[index]
        raw = self._seen(index, self.task.test.x[indices])
        return self.task.prepare(raw).to(device), torch.from_numpy(self.task.test.y[indices]).to(device)


def held_out(task: Task, fraction: float) -> Task:
    """Return `task` with `fraction` of every class of its training examples as ``validation``, the same for every seed.

    Without a fraction the task is returned as it is.
    """
    if not fraction:
        return task
    kept, held = stratified(np.asarray(task.train.y), fraction, "validation split")
    if not len(held):
        raise ConfigError(f"task.validation={fraction:g}: no class has enough examples to hold one out. Raise it.")
    return replace(task, train=task.train.take(kept), validation=task.train.take(held))


def digests(task: Task) -> dict[str, str]:
    """Return the SHA-256 of the ``train`` and ``test`` examples of `task`; what this process does not have is left out.

    Covered are types, shapes and bytes of raw inputs, labels and owners. Of an array of more than :data:`MOST_BYTES`
    every n-th block counts, and of inputs that are no array the type alone.
    """
    found = {}
    for part, examples in (("train", task.train), ("test", task.test)):
        digest = hashlib.sha256()
        for array in (examples.x, examples.y, examples.users):
            if not isinstance(array, np.ndarray) or array.dtype.hasobject:
                digest.update(type(array).__name__.encode())
                continue
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            rows = max(1, BLOCK // max(1, array.nbytes // max(1, len(array))))
            for start in range(0, len(array), rows * max(1, -(-array.nbytes // MOST_BYTES))):
                digest.update(np.ascontiguousarray(array[start : start + rows]).tobytes())
        if len(examples):
            found[part] = digest.hexdigest()
    return found


_loaded: dict[str, FederatedData] = {}


def load(
    task: ModuleType, task_settings: Settings, partition: ModuleType, partition_settings: Settings, seed: int
) -> FederatedData:
    """Load a task and partition it; a second call with the same arguments reuses the data of the last call.

    Module `task` has ``load(settings)``, `partition` has ``split(settings, task, seed)``; `seed` is the run's.
    """
    settings = task_settings.model_dump_json(), partition_settings.model_dump_json()
    wanted = f"{task.__name__} {partition.__name__} {settings} {seed}"
    if wanted not in _loaded:
        loaded = held_out(task.load(task_settings), getattr(task_settings, "validation", 0.0))
        parts: Partition = partition.split(partition_settings, loaded, seed)
        _loaded.clear()
        _loaded[wanted] = FederatedData(loaded, parts)
    return _loaded[wanted]


def forget() -> None:
    """Discard the loaded data, so that the next :func:`load` reads it anew."""
    _loaded.clear()
