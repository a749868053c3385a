"""Batch normalisation of the real rows of a padded batch.

A recorded step has one shape, so short batches are padded. torch's batch normalisation would take the padding for data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

#: Axes over which a channel is summed, in tensors (..., batch, channels, values).
_SUMMED = (-3, -1)


@contextmanager
def masked(modules: Sequence[nn.Module], mask: Tensor) -> Iterator[None]:
    """Let the batch normalisation of `modules` see only the rows where `mask` (batch,) is 1, inside the block."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)]
    rows = mask.sum()
    for layer in layers:
        layer.forward = partial(_forward, layer, mask, rows)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: _BatchNorm, mask: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """Return what `layer` makes of the real rows of `x` (batch, channels, ...); the other rows hold no meaning."""
    if not layer.training or len(x) != len(mask):  # kept statistics, or examples that the method made itself
        return type(layer).forward(layer, x)
    values = x.reshape(*x.shape[:2], -1)
    like = values if layer.weight is None else layer.weight
    kept = mask.to(like.dtype).view(-1, 1, 1)
    ones = like.new_ones(x.shape[1], 1)
    weight = ones if layer.weight is None else layer.weight.view(-1, 1)
    bias = 0 * ones if layer.bias is None else layer.bias.view(-1, 1)
    count = rows.to(like.dtype) * values.shape[-1]
    found: Any = _Norm.apply(values.to(like.dtype), kept, weight, bias, count, layer.eps)
    out, mean, variance, *_ = found
    with torch.no_grad():
        known = count > 1 if values.shape[-1] == 1 else None
        unbiased = variance.detach() * (count / (count - 1))
        _remember(layer, mean.detach().view(-1), unbiased.view(-1), known)
    return out.view(x.shape).to(x.dtype)  # type: ignore[no-any-return]


def _remember(layer: _BatchNorm, mean: Tensor, variance: Tensor, known: Tensor | None) -> None:
    """Update the running statistics of `layer` as torch does; they stay where `known` is false.

    A single value of a channel has no variance. Torch raises an error; a recorded step does not wait to find that out.
    """
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    for kept, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        if kept is None:
            continue
        if known is not None:
            new = torch.where(known, new, kept)
        if layer.momentum is not None:
            kept.mul_(1 - layer.momentum).add_(new, alpha=layer.momentum)
        elif layer.num_batches_tracked is not None:  # the mean of all batches
            kept.add_((new - kept) / layer.num_batches_tracked)


class _Norm(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the kept rows; padding gets `bias`.

    x (..., batch, channels, values), mask (..., batch, 1, 1), weight and bias (..., channels, 1), count (...). The
    other outputs, mean and biased variance (..., 1, channels, 1) and what the gradient needs, have no gradient.
    """

    @staticmethod
    def forward(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, count: Tensor, eps: float) -> Any:
        """Return the output, mean and variance, and what the gradient needs."""
        count = count[..., None, None, None]
        mean = (x * mask).sum(_SUMMED, keepdim=True) / count
        unit = (x - mean) * mask
        variance = unit.square().sum(_SUMMED, keepdim=True) / count
        scale = (variance + eps).rsqrt()
        unit = unit * scale
        out = torch.addcmul(bias.unsqueeze(-3), unit, weight.unsqueeze(-3))
        return out, mean, variance, unit, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the gradient needs."""
        _, mask, weight, _, count, _ = inputs
        ctx.save_for_backward(mask, weight, count, output[3], output[4])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        """Return the gradients."""
        mask, weight, count, unit, scale = ctx.saved_tensors
        slope = slopes[0] * mask
        by_weight = (slope * unit).sum(_SUMMED, keepdim=True)
        by_bias = slope.sum(_SUMMED, keepdim=True)
        mean = torch.addcmul(by_bias, unit, by_weight) / count[..., None, None, None]
        x = (slope - mean) * (weight.unsqueeze(-3) * scale) * mask
        return x, None, by_weight.squeeze(-3), by_bias.squeeze(-3), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Treat the clients' axis as one of the leading ones."""

        def first(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.movedim(dim, 0) if dim is not None else value.expand(info.batch_size, *value.shape)

        return _Norm.apply(*map(first, inputs, in_dims)), 0
