"""Pooling: over 2x2 for training on a CPU, and to a fixed size for a GPU that has to repeat itself.

:class:`MaxPool2` has torch's values, indices and gradients, found several times faster on a CPU.
Torch's kernel is slow where pictures have few channels: 0.48 of the 3.4 ms of a LeNet-5 step of 50 examples, the
compiled loop 0.13. It pays for being compiled only in a process that pools much, so the first :data:`TRIAL` numbers
of a process go through torch.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

TRIAL = 2**26
"""Numbers pooled by torch before the loop is compiled: some 200 steps of LeNet-5. Compiling takes about a second."""

_WINDOW = ([2, 2], [2, 2], [0, 0], [1, 1], False)  # kernel, stride, padding, dilation, ceil_mode
_pooled = 0


class MaxPool2(nn.MaxPool2d):
    """``nn.MaxPool2d(2)``; the same to the bit. Float tensor (batch, channels, height, width), halves both sides."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest of each 2x2 window; NaN wins."""
        global _pooled
        if _pooled >= TRIAL and _suits(x):
            return cast(Tensor, _Pool.apply(x))
        _pooled += x.numel()
        return cast(Tensor, super().forward(x))


def _suits(x: Tensor) -> bool:
    return bool(
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.dim() == 4
        and x.size(2) % 2 == x.size(3) % 2 == 0
        and x.numel() > 0
        and not torch._C._are_functorch_transforms_active()  # torch has no public name for it; a test watches it
        and x.is_contiguous(memory_format=torch.channels_last)
        and math.isfinite(x.detach().sum())  # the loop would have to ask each number whether it is NaN
    )


class MeanPool(nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d``, also where only algorithms are allowed that repeat themselves.

    torch's gradient has none on a GPU unless the result is 1x1. There the same means are found by pooling in windows of
    one size, or as two products with a matrix.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return means over a grid of windows, shape (..., rows, columns)."""
        if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
            return super().forward(x)
        size: Any = self.output_size
        rows, columns = (size, size) if isinstance(size, int) else size
        return _means(x, rows or x.shape[-2], columns or x.shape[-1])


def _means(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the means of `x` (..., height, width) over a grid of `rows` times `columns` windows."""
    height, width = x.shape[-2:]
    if height % rows == width % columns == 0:
        return nn.functional.avg_pool2d(x, (height // rows, width // columns))
    return _windows(x, height, rows) @ x @ _windows(x, width, columns).T


def _windows(like: Tensor, length: int, count: int) -> Tensor:
    """Return the matrix (count, length) that takes the means of torch's adaptive windows.

    It is made on the device of `like`: a recorded step cannot copy one from the host.
    """
    number = torch.arange(count, device=like.device)[:, None]
    place = torch.arange(length, device=like.device)
    inside = (place >= number * length // count) & (place < -(-(number + 1) * length // count))
    return inside.to(like.dtype) / inside.sum(1, keepdim=True)


class _Pool(torch.autograd.Function):
    """Our loop forward; torch's own function backward, which is fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from fedcross.tasks.models.pooling_loop import pool

        n, c, h, w = x.shape
        out = torch.empty((n, h // 2, w // 2, c), dtype=x.dtype)
        index = torch.empty(out.shape, dtype=torch.int64)
        pool(x.detach().permute(0, 2, 3, 1).numpy(), out.numpy(), index.numpy())
        ctx.save_for_backward(x, index.permute(0, 3, 1, 2))
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, index = ctx.saved_tensors
        out: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradients[0], x, *_WINDOW, index)
        return out
