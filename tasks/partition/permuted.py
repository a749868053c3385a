"""Permuted pixels: equal sets, but every client sees its pictures through a fixed shuffle of the pixels of its own.

Source: FedFusion (Yao et al., ICIP 2019), "user-specific non-IID"; after Goodfellow et al., arXiv 1312.6211. The
shuffle moves whole pixels: all channels alike. Its code lets global and local agents draw their own, unseeded
permutations; here client i has one, keyed by (seed, i), everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition import iid

Params = iid.Params


@lru_cache(maxsize=256)
def permutation(seed: int, client: int, pixels: int) -> IntArray:
    """Return the client's permutation of ``range(pixels)``."""
    return stream(seed, "partition permuted", client).permutation(pixels)


@dataclass(frozen=True)
class PermutePixels:
    """Shuffle pixels; picklable. Of N clients, test example i goes through the permutation of client i mod N."""

    seed: int
    clients: int

    def __call__(self, client: int, raw: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Return `raw` ``(n, channels, height, width)`` with the pixels in this client's order."""
        flat: npt.NDArray[Any] = raw.reshape(*raw.shape[:2], -1)
        return flat[:, :, permutation(self.seed, client, flat.shape[2])].reshape(raw.shape)

    def test(self, indices: IntArray, raw: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Return test inputs `raw` at `indices`, each through the permutation of client (index mod N)."""
        owner, out = np.asarray(indices) % self.clients, np.empty_like(raw)
        for client in np.unique(owner):
            out[owner == client] = self(int(client), raw[owner == client])
        return out


def split(params: Params, task: Task, seed: int) -> Partition:
    """Return equal sets with one permutation per client; client c's own test examples are those with i mod N = c."""
    if len(task.shape) != 3:
        raise ConfigError(f"partition=permuted needs pictures; task {task.name} has inputs of shape {task.shape}.")
    permute, N = PermutePixels(seed, params.clients), params.clients
    test = [np.arange(client, len(task.test), N) for client in range(N)]
    equal = iid.split(params, task, seed)
    return Partition(train=equal.train, test=test, transform=permute, test_transform=permute.test)
