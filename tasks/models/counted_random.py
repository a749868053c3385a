"""Random numbers that are pure functions of a counter: inside a network or a loss, also under ``torch.func.vmap``.

A loss draws with a key that its objective makes once per visit, ``torch.tensor(core.randomness.key(...))``, the step,
``Batch.step``, and a position. The mixing function is SplitMix64 (Steele, Lea and Flood 2014).
"""

import math

import torch
from torch import Tensor

# SplitMix64's increment, and multipliers of its mixing function, as signed numbers because torch computes modulo 2^64
# only on int64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 24  # a float32 holds every multiple of 2^-24 in [0, 1)


def logical_shift(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros (torch's own shift repeats the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's mixing of int64 `z`, any shape; a bijection of 64-bit numbers."""
    z = (z ^ logical_shift(z, 30)) * _FIRST
    z = (z ^ logical_shift(z, 27)) * _SECOND
    return z ^ logical_shift(z, 31)


def _signed(number: int) -> int:
    """Return `number` modulo 2^64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def uniform(key: Tensor, step: int | Tensor, purpose: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return independent uniform numbers in [0, 1), multiples of 2^-24 whatever the `dtype`.

    `key`, int64 (), is the identity of the visit, `step` its step from 0; `purpose` distinguishes several draws within
    one step. Leading rows of `shape` do not depend on how many rows follow.
    """
    counter = (step + 1) * GOLDEN  # a tensor's product is modulo 2^64 already
    start = mix(key + (counter if isinstance(counter, Tensor) else _signed(counter)))
    start = mix(start + _signed((purpose + 1) * GOLDEN))
    index = torch.arange(1, math.prod(shape) + 1, device=key.device)
    bits = logical_shift(mix(start + index * GOLDEN), 64 - _BITS)
    return (bits.to(dtype) * 2.0**-_BITS).reshape(shape)


def normal(key: Tensor, step: int | Tensor, purpose: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return independent standard normal numbers (Box and Muller 1958); parameters as for :func:`uniform`."""
    pairs = uniform(key, step, purpose, (*shape, 2), dtype)
    return torch.sqrt(-2.0 * torch.log(1.0 - pairs[..., 0])) * torch.cos(2.0 * math.pi * pairs[..., 1])


def categorical(key: Tensor, step: int | Tensor, purpose: int, count: int, weights: Tensor) -> Tensor:
    """Return `count` indices, int64 (count,), drawn in proportion to `weights` (classes,), not all of them 0.

    An index of weight 0 is never drawn.
    """
    if weights.device.type == "cpu":
        bounds = torch.cumsum(weights, 0)
    else:  # a GPU's cumsum may fall and not repeat
        bounds = weights.expand(len(weights), -1).tril().sum(1)
    points = uniform(key, step, purpose, (count,), weights.dtype) * bounds[-1]
    return (points[:, None] >= bounds[None, :]).sum(1)
