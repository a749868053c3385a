"""Dropout whose masks are a pure function of a counter, not of a global generator.

One client trained alone, many clients trained together under ``torch.func.vmap``, and a GPU therefore drop the same
elements. A layer's ``state`` is a buffer: a trainer sets it at the start of a visit, or stacks one per client.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedcross.core.randomness import key
from fedcross.tasks.models.counted_random import GOLDEN, logical_shift, mix

_NEXT = 0x5851F42D4C957F2D
_BITS = 53


class Dropout(nn.Module):
    """Zero each element with probability `p` and scale the others by 1/(1-p), in training mode only.

    The mask of the element with logical index i is the i-th output of SplitMix64 started at ``state`` (a buffer outside
    the ``state_dict``), on every device; then ``state`` moves on. Padding a batch at its end changes nothing. With
    `rows` there is one decision per row of the batch (stochastic depth).
    """

    state: Tensor

    def __init__(self, p: float, rows: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability {p} is not in [0, 1)")
        self.p = p
        self.rows = rows
        self.register_buffer("state", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements dropped, same shape and dtype."""
        if not self.training or self.p == 0.0:
            return x
        shape = (x.shape[0], *(1,) * (x.dim() - 1)) if self.rows else x.shape
        count = x.shape[0] if self.rows else x.numel()
        index = torch.arange(1, count + 1, device=x.device)
        uniform = logical_shift(mix(self.state + index * GOLDEN), 64 - _BITS)
        kept = (uniform >= round(self.p * (1 << _BITS))).reshape(shape)
        self.state.copy_(mix(self.state ^ _NEXT))
        return x * (kept.to(x.dtype) * (1.0 / (1.0 - self.p)))


def count_dropout(module: nn.Module) -> None:
    """Replace dropout and stochastic depth inside `module`, in place, by counter-based ones of the same probability."""
    for name, layer in list(module.named_modules()):
        rows = type(layer).__name__ == "StochasticDepth"  # torchvision's
        if (rows or isinstance(layer, nn.Dropout)) and name and float(layer.p) < 1:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, Dropout(float(layer.p), rows))


def dropout_states(module: nn.Module, seed_key: int) -> dict[str, Tensor]:
    """Return a fresh state (int64, on the CPU) for each dropout layer of `module`, by full buffer name.

    `seed_key` is a key of :func:`core.randomness.key`, for example of (seed, "dropout", round, client).
    """
    return {
        name: torch.tensor(key(seed_key, "dropout layer", i), dtype=torch.int64)
        for i, name in enumerate(dropout_names(module))
    }


def dropout_names(module: nn.Module) -> list[str]:
    """Return the full names of the dropout states among `module`'s buffers, in the order of its layers."""
    layers = (name for name, child in module.named_modules() if isinstance(child, Dropout))
    return [f"{name}.state" if name else "state" for name in layers]


def seed_dropout(module: nn.Module, seed_key: int) -> None:
    """Set every dropout layer of `module`, in place, to its state of :func:`dropout_states`."""
    for name, state in dropout_states(module, seed_key).items():
        module.get_buffer(name).copy_(state)
