"""Random numbers inside a loss: pure functions of a key, a step and a position, also under ``torch.func.vmap``.

The key is a tensor that an objective makes once per visit, ``torch.tensor(tasks.randomness.key(...))``; the step is
``Batch.step``. The mixing function is SplitMix64 (Steele, Lea and Flood 2014), as for the dropout masks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# SplitMix64's constants as signed numbers: torch computes modulo 2^64 on int64 only.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 24  # a float32 holds every multiple of 2^-24 in [0, 1)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Return `number` modulo 2^64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(z: Tensor) -> Tensor:
    """Return SplitMix64's mixing of int64 `z`, any shape."""
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def uniform(key: Tensor, step: int | Tensor, purpose: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return independent uniform numbers in [0, 1), multiples of 2^-24 whatever the `dtype`.

    `key`, int64 (), is the identity of the visit, `step` its step from 0; `purpose` distinguishes several draws within
    one step. Leading rows of `shape` do not depend on how many rows follow.
    """
    counter = (step + 1) * _GOLDEN  # a tensor's product is modulo 2^64 already
    start = _mix(
        _mix(key + (counter if isinstance(counter, Tensor) else _signed(counter))) + _signed((purpose + 1) * _GOLDEN)
    )
    index = torch.arange(1, math.prod(shape) + 1, device=key.device)
    bits = _shift(_mix(start + index * _GOLDEN), 64 - _BITS)
    return (bits.to(dtype) * 2.0**-_BITS).reshape(shape)


def normal(key: Tensor, step: int | Tensor, purpose: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return independent standard normal numbers (Box and Muller 1958); parameters as for :func:`uniform`."""
    pairs = uniform(key, step, purpose, (*shape, 2), dtype)
    radius = torch.sqrt(-2.0 * torch.log(1.0 - pairs[..., 0]))
    return radius * torch.cos(2.0 * math.pi * pairs[..., 1])


def categorical(key: Tensor, step: int | Tensor, purpose: int, count: int, weights: Tensor) -> Tensor:
    """Return `count` indices, int64 (count,), drawn in proportion to `weights` (classes,), not all of them 0.

    An index of weight 0 is never drawn.
    """
    bounds = _sums(weights)
    points = uniform(key, step, purpose, (count,), weights.dtype) * bounds[-1]
    return (points[:, None] >= bounds[None, :]).sum(1)


def _sums(weights: Tensor) -> Tensor:
    """Return the sum of each element and those before it (classes,). A GPU's ``cumsum`` may fall and not repeat."""
    if weights.device.type == "cpu":
        return torch.cumsum(weights, 0)
    return weights.expand(len(weights), -1).tril().sum(1)
