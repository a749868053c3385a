"""Counter-based randomness: every draw is a pure function of (seed, purpose, indices).

No other code touches a global generator, so a resumed, a parallel and a networked run draw the same numbers as a
sequential one. Code of others that draws from global generators runs in :func:`global_generators`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def key(seed: int, purpose: str, *indices: int) -> int:
    """Return a 63-bit integer that depends on all arguments and nothing else.

    Parameters
    ----------
    seed : int
        The run's seed, 0 or more.
    purpose : str
        Purpose of the draw, for example ``"sample"`` or ``"shuffle"``.
    *indices : int
        Counters such as the round and the client, 0 or more each.
    """
    text = "/".join([str(int(seed)), purpose, *(str(int(i)) for i in indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return a fresh Philox generator keyed by ``key(seed, purpose, *indices)``."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *indices)))


def torch_stream(seed: int, purpose: str, *indices: int, device: str = "cpu") -> torch.Generator:
    """Return a torch generator on `device` seeded by ``key(seed, purpose, *indices)``."""
    import torch

    return torch.Generator(device=device).manual_seed(key(seed, purpose, *indices))


@contextmanager
def global_generators(seed: int, purpose: str, *indices: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generator by ``key(seed, purpose, *indices)`` inside; restore them."""
    import torch

    number, pythons, numpys = key(seed, purpose, *indices), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(number)
            np.random.seed(number % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(number)
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002
