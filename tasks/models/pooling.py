"""Pooling: over 2x2 for training on a CPU, and to a fixed size for a GPU that has to repeat itself.

Three quarters of what a convolution gives to a max-pool get no gradient. :class:`Convolution` with a
:class:`MaxPool2` behind it leaves those out on the way back, in half of torch's time. The pool's values are torch's;
the gradients' sums have another order than torch's, the same on every CPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_MADE = "_fedcross_made_of"  # attribute of a convolution's output


class Made(NamedTuple):
    """What a convolution's output was made of; `versions` are torch's counts of changes in place of y, x and weight."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    padding: tuple[int, int]
    versions: tuple[int, ...]


class Convolution(nn.Conv2d):
    """``nn.Conv2d(channels_in, channels_out, kernel, padding=padding)``, for a :class:`MaxPool2` behind it."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, padding: int = 0) -> None:
        super().__init__(channels_in, channels_out, kernel, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of (batch, channels, height, width); it remembers what it was made of."""
        weight, bias = self.weight, self.bias  # once: a parametrized weight may be another one at the next look
        y = cast(Tensor, self._conv_forward(x, weight, bias))
        if self.training and torch.is_grad_enabled() and bias is not None and _plain(x, y, weight):
            versions = y._version, x._version, weight._version
            setattr(y, _MADE, Made(x, weight, bias, cast(tuple[int, int], self.padding), versions))
        return y


def _made(y: Tensor) -> Made | None:
    """Return what `y` was made of, if all of it is as it was, and nobody asks for the gradient of `y` itself."""
    made: Made | None = getattr(y, _MADE, None)
    if made is None or made.versions != (y._version, made.x._version, made.weight._version):
        return None
    return None if not y.requires_grad or y.retains_grad or y._backward_hooks or not y.numel() else made


def _plain(*tensors: Tensor) -> bool:
    traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
    return not (traced or torch._C._are_functorch_transforms_active()) and all(
        type(one) in (Tensor, nn.Parameter)
        and one.device.type == "cpu"
        and one.dtype == torch.float32
        and one.dim() == 4
        for one in tensors
    )


class MaxPool2(nn.MaxPool2d):
    """``nn.MaxPool2d(2)``, the same to the bit; behind a :class:`Convolution` its gradients up to rounding."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest of each 2x2 window of (batch, channels, height, width); NaN wins."""
        if (made := _made(x)) is not None:
            return cast(Tensor, _Both.apply(made.x, made.weight, made.bias, x.detach(), made.padding))
        height, width = (size // 2 * 2 for size in x.shape[-2:])
        if height and width and not torch.is_grad_enabled() and _plain(x):  # torch's pool also finds the places
            larger = torch.maximum(x[..., :height:2, :], x[..., 1::2, :])
            return torch.maximum(larger[..., :width:2], larger[..., 1::2])
        return cast(Tensor, super().forward(x))


class MeanPool(nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d``, also where only algorithms are allowed that repeat themselves (torch's has none)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return means over a grid of windows, shape (..., rows, columns)."""
        if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
            return super().forward(x)
        size = cast(int, self.output_size)
        height, width = x.shape[-2:]
        if height % size == width % size == 0:
            return functional.avg_pool2d(x, (height // size, width // size))
        return _windows(x, height, size) @ x @ _windows(x, width, size).T


def _windows(like: Tensor, length: int, count: int) -> Tensor:
    """Return the matrix (count, length) that takes the means of torch's adaptive windows, on the device of `like`."""
    number = torch.arange(count, device=like.device)[:, None]
    place = torch.arange(length, device=like.device)
    inside = (place >= number * length // count) & (place < -(-(number + 1) * length // count))
    return inside.to(like.dtype) / inside.sum(1, keepdim=True)


def _pool(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pool of `y` and the places of its values; by the compiled loop where it is torch's, channels last."""
    from fedcross.tasks.models.pooling_loop import pool

    if not (y.is_contiguous(memory_format=torch.channels_last) and math.isfinite(y.sum())):  # the loop knows no NaN
        return functional.max_pool2d(y, 2, return_indices=True)
    n, c, h, w = y.shape
    out = torch.empty((n, h // 2, w // 2, c), dtype=y.dtype)
    index = torch.empty(out.shape, dtype=torch.int64)
    pool(y.permute(0, 2, 3, 1).numpy(), out.numpy(), index.numpy())
    return out.permute(0, 3, 1, 2), index.permute(0, 3, 1, 2)


class _Both(torch.autograd.Function):
    """The pool of a convolution's output `y`; backward through both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, padding: tuple[int, int]) -> Tensor:
        out, index = _pool(y)
        ctx.save_for_backward(x, weight, bias, index)
        ctx.padding = padding
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight, bias, index) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradient's gradient, which torch's functions have
            y = functional.conv2d(x, weight, bias, padding=ctx.padding)
            pooled = functional.max_pool2d(y, 2)
            inputs = [one for one in (x, weight, bias) if one.requires_grad]
            found = iter(torch.autograd.grad(pooled, inputs, gradient, create_graph=True))
            return *(next(found) if one.requires_grad else None for one in (x, weight, bias)), None, None
        return *_back(ctx.needs_input_grad, gradient, x, weight, index, ctx.padding), None, None


def _back(
    wanted: tuple[bool, ...], gradient: Tensor, x: Tensor, weight: Tensor, index: Tensor, padding: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of a convolution's input, weights and bias from the `gradient` of the pool behind it.

    `wanted` says whether those of input and weights are; `index` where the pool's values come from.
    """
    from fedcross.tasks.models import pooling_loop as loop

    # A patch's row is `columns * depth` floats of the padded pictures, channels last, taken `run` at once.
    (n, depth, high, wide), (channels, _, rows, columns), (down, right) = x.shape, weight.shape, padding
    run = -(-columns * depth // loop.LANES) * loop.LANES
    line = (wide + 2 * right) * depth
    image = (high + 2 * down) * line
    g = gradient.permute(0, 2, 3, 1).reshape(n, -1, channels).contiguous()
    down_by, right_by = torch.arange(high + 2 * down - rows + 1)[:, None], torch.arange(wide + 2 * right - columns + 1)
    beginnings = (down_by * line + right_by * depth).flatten().int()
    places = beginnings.index_select(0, index.permute(0, 2, 3, 1).reshape(-1))
    given = g.numpy(), places.numpy()
    shape = n, high + 2 * down, wide + 2 * right, depth
    inner = ..., slice(down, down + high), slice(right, right + wide), slice(None)
    to_x = to_weight = None
    if wanted[1]:
        pixels = torch.zeros(n * image + run, dtype=torch.float32)
        pixels[: n * image].view(shape)[inner] = x.permute(0, 2, 3, 1)
        sums = torch.zeros(channels, rows, run, dtype=torch.float32)
        loop.patches(*given, pixels.numpy(), sums.numpy(), image, line, False)
        to_weight = sums[..., : columns * depth].reshape(channels, rows, columns, depth).permute(0, 3, 1, 2)
    if wanted[0]:
        factors = torch.zeros(channels, rows, run, dtype=torch.float32)
        factors[..., : columns * depth] = weight.detach().permute(0, 2, 3, 1).reshape(channels, rows, -1)
        pixels = torch.zeros(n * image + run, dtype=torch.float32)
        loop.patches(*given, pixels.numpy(), factors.numpy(), image, line, True)
        to_x = pixels[: n * image].view(shape)[inner].permute(0, 3, 1, 2)
    return to_x, to_weight, g.sum((0, 1))
