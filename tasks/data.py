"""A task and its partition over clients, loaded once per process and shared by all clients in the process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from fedcross.core.errors import DataError
from fedcross.core.settings import Settings
from fedcross.tasks.base import Examples, Partition, Task
from fedcross.tasks.inputs import Inputs

#: Bytes of an array that are digested at once, and of a larger array in all: blocks spread evenly over it.
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

    def client(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all prepared inputs (n, ...) and labels (n,) of client `index` on `device`; see :meth:`inputs`."""
        inputs, labels = self.inputs(index, device)
        return inputs[:], labels

    def inputs(self, index: int, device: torch.device) -> tuple[Inputs, Tensor]:
        """Return the inputs and labels (n,) of client `index` on `device`.

        Raises
        ------
        DataError
            If there is no such client or it owns nothing.
        """
        if self.partition.own:
            index = 0
        parts = self.partition.train
        if not 0 <= index < len(parts):
            raise DataError(f"client {index}: the partition has clients 0 to {len(parts) - 1}.")
        indices = parts[index]
        if len(indices) == 0 and self.partition.own:
            raise DataError("This device's data has no training examples, only test examples. Give it some to learn.")
        if len(indices) == 0:
            raise DataError(f"client {index} owns no examples. Use another partition or fewer clients.")
        raw = self.task.train.x[indices]
        if self.partition.transform is not None:
            raw = self.partition.transform(index, raw)
        labels = torch.from_numpy(self.task.train.y[indices])
        return Inputs.of(raw, self.task.prepare, device), labels.to(device)

    def union(
        self, share: float, generator: np.random.Generator, device: torch.device, most: int | None = None
    ) -> tuple[Inputs, Tensor]:
        """Return inputs and labels drawn without replacement from what all clients own together, for references only.

        Parameters
        ----------
        share : float
            Share to draw, in (0, 1]; at least one example is drawn.
        generator : numpy.random.Generator
            Generator for the draw; the examples are returned in the order of the clients.
        device : torch.device
            Device of the result.
        most : int, optional
            Largest number of examples that counts for a client (``train.examples``). The share refers to the sum of
            these numbers; the draw is from all examples.

        Raises
        ------
        DataError
            If this process knows its own data only.
        """
        if self.partition.own:
            raise DataError("This device has its own data only, the method needs everybody's. Run it as a simulation.")
        sizes = [len(part) for part in self.partition.train]
        count = max(1, round(share * sum(min(size, most or size) for size in sizes)))
        chosen = np.sort(generator.permutation(sum(sizes))[:count])
        pieces, labels = [], []
        for client, start in enumerate(np.cumsum([0, *sizes[:-1]])):
            inside = chosen[(chosen >= start) & (chosen < start + sizes[client])] - start
            if len(inside) == 0:
                continue
            indices = self.partition.train[client][inside]
            raw = self.task.train.x[indices]
            pieces.append(raw if self.partition.transform is None else self.partition.transform(client, raw))
            labels.append(self.task.train.y[indices])
        inputs = Inputs.of(np.concatenate(pieces), self.task.prepare, device)
        return inputs, torch.from_numpy(np.concatenate(labels)).to(device)

    def client_test(self, index: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the test inputs and labels that client `index` owns, in its own view; None if it has none."""
        index = 0 if self.partition.own else index
        if self.partition.test is None or len(self.partition.test[index]) == 0:
            return None
        indices = self.partition.test[index]
        raw = self.task.test.x[indices]
        if self.partition.transform is not None:
            raw = self.partition.transform(index, raw)
        return self.task.prepare(raw).to(device), torch.from_numpy(self.task.test.y[indices]).to(device)


def digests(task: Task) -> dict[str, str]:
    """Return the SHA-256 of the ``train`` and ``test`` examples of `task`; what this process does not have is left out.

    Covered are the raw inputs, the labels and the owners of the examples that the settings leave: their types, shapes
    and bytes, in their order. Of an array of more than :data:`MOST_BYTES` every n-th block counts, and of inputs that
    are no array (a task of one's own that reads them when they are asked for) the type alone. Names of labels, columns
    and owners do not count, and nothing of where the files lie.
    """
    parts = {"train": task.train, "test": task.test}
    return {part: _digest(examples) for part, examples in parts.items() if len(examples)}


def _digest(examples: Examples) -> str:
    digest = hashlib.sha256()
    for array in (examples.x, examples.y, examples.users):
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            digest.update(type(array).__name__.encode())
            continue
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        for block in _blocks(array):
            digest.update(block)
    return digest.hexdigest()


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of `array`, block by block, without a copy of the whole."""
    if not array.nbytes:
        return
    rows = max(1, BLOCK // max(1, array.nbytes // len(array)))
    starts = range(0, len(array), rows)
    for start in starts[:: -(-array.nbytes // MOST_BYTES)]:
        yield np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8).data


_loaded: dict[str, FederatedData] = {}


def load(
    task: ModuleType, task_settings: Settings, partition: ModuleType, partition_settings: Settings, seed: int
) -> FederatedData:
    """Load a task and partition it; a second call with the same arguments reuses the data of the last call.

    Parameters
    ----------
    task : module
        Has ``load(settings) -> Task``.
    task_settings : Settings
        The task's own.
    partition : module
        Has ``split(settings, task, seed) -> Partition``.
    partition_settings : Settings
        The partition's own.
    seed : int
        The run's seed, for the partition's draws.
    """
    settings = task_settings.model_dump_json(), partition_settings.model_dump_json()
    wanted = f"{task.__name__} {partition.__name__} {settings} {seed}"
    if wanted not in _loaded:
        loaded: Task = task.load(task_settings)
        parts: Partition = partition.split(partition_settings, loaded, seed)
        _loaded.clear()
        _loaded[wanted] = FederatedData(loaded, parts)
    return _loaded[wanted]


def forget() -> None:
    """Discard the loaded data, so that the next :func:`load` reads it anew."""
    _loaded.clear()
