"""Pooling: over 2x2 for training on a CPU, and to a fixed size for a GPU that has to repeat itself.

:class:`MaxPool2` has torch's values, indices and gradients, found several times faster on a CPU.
Torch's kernel is slow where pictures have few channels: 0.48 of the 3.4 ms of a LeNet-5 step of 50 examples, the
compiled loop 0.13. It pays for being compiled only in a process that pools much, so the first :data:`TRIAL` numbers
of a process go through torch.

Three quarters of what a convolution gives to a max-pool get no gradient, and more where a ReLU comes after it. So
:class:`Convolution` with a :class:`MaxPool2` behind it leaves those out on the way back, in a half to two thirds of
torch's time. The sums have another order than torch's, so their last bits differ; they are the same on every CPU. It is
used from the first step on in every process, so that a model does not depend on who trained it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

TRIAL = 2**26
"""Numbers pooled by torch before the loop is compiled: some 200 steps of LeNet-5. Compiling takes about a second."""

_WINDOW = ([2, 2], [2, 2], [0, 0], [1, 1], False)  # kernel, stride, padding, dilation, ceil_mode
_pooled = 0
_MADE = "_fedcross_made_of"  # attribute of a convolution's output


@dataclass(frozen=True)
class Made:
    """What a convolution's output was made of."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    padding: tuple[int, int]
    versions: tuple[int, ...]
    """torch's counts of changes in place: of the output, of `x` and of `weight`."""


class Convolution(nn.Conv2d):
    """``nn.Conv2d(channels_in, channels_out, kernel, padding=padding)``, for a :class:`MaxPool2` behind it.

    Float tensor (batch, channels, height, width). In training the pool behind it takes over the way back.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int, padding: int = 0) -> None:
        super().__init__(channels_in, channels_out, kernel, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution; it remembers what it was made of."""
        weight, bias = self.weight, self.bias  # once: a parametrized weight may be another one at the next look
        y = cast(Tensor, self._conv_forward(x, weight, bias))
        if self.training and torch.is_grad_enabled() and bias is not None and self._usual() and _plain(x, y, weight):
            versions = y._version, x._version, weight._version
            setattr(y, _MADE, Made(x, weight, bias, cast(tuple[int, int], self.padding), versions))
        return y

    def _usual(self) -> bool:
        return (
            self.stride == self.dilation == (1, 1)
            and self.groups == 1
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
        )


def _made(y: Tensor) -> Made | None:
    """Return what `y` was made of, if all of it is as it was, and nobody asks for the gradient of `y` itself."""
    made: Made | None = getattr(y, _MADE, None)
    if made is None or made.versions != (y._version, made.x._version, made.weight._version):
        return None
    return None if not y.requires_grad or y.retains_grad or y._backward_hooks or not y.numel() else made


def _plain(*tensors: Tensor) -> bool:
    traced = torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
    return (
        not traced
        and not torch._C._are_functorch_transforms_active()
        and all(
            type(one) in (Tensor, nn.Parameter)
            and one.device.type == "cpu"
            and one.dtype == torch.float32
            and one.dim() == 4
            for one in tensors
        )
    )


class MaxPool2(nn.MaxPool2d):
    """``nn.MaxPool2d(2)``; the same to the bit. Float tensor (batch, channels, height, width), halves both sides.

    Behind a :class:`Convolution` its gradients are those of the convolution too, up to rounding.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest of each 2x2 window; NaN wins."""
        usual = (self.kernel_size, self.stride, self.padding, self.dilation) == (2, 2, 0, 1)
        usual &= not (self.ceil_mode or self.return_indices)
        if usual and (made := _made(x)) is not None:
            return cast(Tensor, _Both.apply(made.x, made.weight, made.bias, x.detach(), made.padding))
        if _compiled(x):
            return cast(Tensor, _Pool.apply(x))
        return cast(Tensor, super().forward(x))


def _compiled(x: Tensor) -> bool:
    """Return whether `x` goes through the compiled loop; count it if not."""
    global _pooled
    if _pooled >= TRIAL and _suits(x):
        return True
    _pooled += x.numel()
    return False


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
        out, index = _loop(x)
        ctx.save_for_backward(x, index)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, index = ctx.saved_tensors
        out: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradients[0], x, *_WINDOW, index)
        return out


def _loop(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pool of `x` and the places of its values, both channels last."""
    from fedcross.tasks.models.pooling_loop import pool

    n, c, h, w = x.shape
    out = torch.empty((n, h // 2, w // 2, c), dtype=x.dtype)
    index = torch.empty(out.shape, dtype=torch.int64)
    pool(x.detach().permute(0, 2, 3, 1).numpy(), out.numpy(), index.numpy())
    return out.permute(0, 3, 1, 2), index.permute(0, 3, 1, 2)


class _Both(torch.autograd.Function):
    """The pool of a convolution's output `y`; backward through both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, padding: tuple[int, int]) -> Tensor:
        out, index = _loop(y) if _compiled(y) else functional.max_pool2d(y, 2, return_indices=True)
        ctx.save_for_backward(x, weight, bias, index)
        ctx.padding = padding
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None, None]:
        (gradient,), (x, weight, bias, index) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradient's gradient, which torch's functions have
            y = functional.conv2d(x, weight, bias, padding=ctx.padding)
            back = torch.ops.aten.max_pool2d_with_indices_backward(gradient, y, *_WINDOW, index)
            wanted = [True, True, True]
            one = torch.ops.aten.convolution_backward(
                back, x, weight, [len(weight)], [1, 1], list(ctx.padding), [1, 1], False, [0, 0], 1, wanted
            )
            return *one, None, None
        return *_back(ctx.needs_input_grad, gradient, x, weight, index, ctx.padding), None, None


def _back(
    wanted: tuple[bool, ...], gradient: Tensor, x: Tensor, weight: Tensor, index: Tensor, padding: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of a convolution's input, weights and bias from that of the pool behind it.

    Parameters
    ----------
    wanted : tuple of bool
        Whether the gradients of input and weights are.
    gradient, index : Tensor, shape (n, channels, height, width)
        Of the pool's output, and where in the convolution's output its values come from.
    """
    from fedcross.tasks.models import pooling_loop as loop

    (n, depth, high, wide), (channels, _, rows, columns), (down, right) = x.shape, weight.shape, padding
    run = -(-columns * depth // loop.LANES) * loop.LANES
    line = (wide + 2 * right) * depth
    image = (high + 2 * down) * line
    g = gradient.permute(0, 2, 3, 1).reshape(n, -1, channels).contiguous()
    places = torch.empty(index.numel(), dtype=torch.int32)
    loop.places(
        index.permute(0, 2, 3, 1).reshape(-1).numpy(), wide + 2 * right - columns + 1, line, depth, places.numpy()
    )
    given = g.numpy(), places.numpy()
    shape, inner = (
        (n, high + 2 * down, wide + 2 * right, depth),
        (..., slice(down, down + high), slice(right, right + wide), slice(None)),
    )
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
