"""Finds out whether the padding of a short batch counts in what a client learns.

Batches of unequal length are padded to one shape. A loss leaves the padding out (:meth:`Batch.mean`). A network that
mixes the rows of a batch, or a method that brings as many examples of its own as a batch has, cannot. That is tried
once, on a client's first examples, before anything is padded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fedcross.client.batched.stack import StackedPrepared, Work, slopes_of
from fedcross.client.device import breaks_device, out_of_memory
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.schema import Train
from fedcross.strategies.objective import Batch, Objective, Tensors, Visit

#: Largest difference that other rows in the place of the padding may make, as a share: the kernels are the same.
CONTENT = 1e-5
#: The same for a batch of fewer rows in place of a padded one: of the loss, of a buffer's change, of the gradient. The
#: kernels may be others, and batch normalisation enlarges what they round.
LOSS, BUFFER, GRADIENT = 1e-3, 1e-2, 5e-2

#: A buffer that changes by less than this share of what all do counts as if it changed by it.
RARELY = 1e-3


class _Result(NamedTuple):
    """Loss (1,), new buffers and gradients by name."""

    loss: Tensor
    buffers: Tensors
    slopes: Tensors


def uneven(visits: Sequence[Visit], batch: int) -> bool:
    """Return whether some steps of `visits` have batches of several lengths, the length of a full one among them."""
    return any(len(visit.y) % batch for visit in visits)


def counts(net: ModuleNet, objective: Objective, work: Work, settings: Train) -> str:
    """Return why batches of clients like `work` may not be padded; empty if they may.

    Tried at the first client of a kind, remembered by `net`.
    """
    key = id(objective), settings.batch, _kind(work, settings.batch)
    if key not in net.padding:
        with _as_before(net):
            net.padding[key] = objective, _tried(net, objective, work, settings)
    return net.padding[key][1]


def _kind(work: Work, batch: int) -> Hashable:
    """Return what clients have in common that mix rows, or do not, alike."""
    leaves, spec = tree_flatten(work.prepared)
    like = tuple(
        (x.shape[1:], x.dtype, x.dim() > 0 and len(x) == batch) if isinstance(x, Tensor) else type(x).__name__
        for x in leaves
    )
    return work.visit.inputs.kind, str(spec), like


@contextmanager
def _as_before(net: ModuleNet) -> Iterator[None]:
    """Restore buffers and random numbers after the block; compute in full precision inside."""
    kept = [(tensor, tensor.detach().clone()) for tensor in net.kept]
    try:
        with torch.random.fork_rng(devices=[]), net.exactly():
            yield
    finally:
        with torch.no_grad():
            for tensor, old in kept:
                tensor.copy_(old)


def _tried(net: ModuleNet, objective: Objective, work: Work, settings: Train) -> str:
    width, visit = settings.batch, work.visit
    real = max(width - max(width // 4, 1), 1)
    rows = torch.arange(width, device=visit.y.device) % len(visit.y)
    x, y = visit.inputs[rows], visit.y[rows]
    others = _others(x)
    padded = [torch.cat([x[:real], pad[real:]]) for pad in (x, others)]
    mask = (torch.arange(width, device=net.device) < real).to(net.flat.dtype)
    own = StackedPrepared.of([work.prepared])
    slopes = slopes_of(net, objective, padded=True)
    buffers = {**visit.buffers, **work.dropout}
    stacks = ({name: value.detach()[None] for name, value in one.items()} for one in (visit.params, buffers))
    params, states = stacks
    try:
        alone = _alone(net, objective, work, buffers, Batch(x[:real], y[:real], None, rows[:real], 0))
        one, two = (
            _Result(*slopes(params, states, own.tree, own.dims, 0, given[None], y[None], mask[None], rows[None]))
            for given in padded
        )
    except Exception as error:
        if out_of_memory(error) or breaks_device(error):
            raise
        return f"a padded batch cannot be computed ({(str(error).splitlines() or [type(error).__name__])[0]})"
    same = _differs(one, two, states, (CONTENT, CONTENT, CONTENT))
    found = same or _differs(alone, one, states, (LOSS, BUFFER, GRADIENT))
    return f"the padding of a short batch would change {found}" if found else ""


def _others(x: Tensor) -> Tensor:
    """Return other rows like those of `x`: far from them, or of the same words in another order."""
    if x.is_floating_point():
        return -3 * x.flip(0) + 1
    moved = x.flip(0)
    return moved.roll(1, 1) if x.dim() > 1 else moved


def _alone(net: ModuleNet, objective: Objective, work: Work, buffers: Tensors, batch: Batch) -> _Result:
    """Return what the sequential trainer computes of `batch`, stacked as one client."""
    leaves = {name: p.detach().requires_grad_() for name, p in work.visit.params.items()}
    changed = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with torch.enable_grad():
        loss = objective.loss(net, leaves, changed, batch, work.prepared)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    slopes = {name: slope[None] for name, slope in zip(leaves, found)}
    return _Result(loss.detach()[None], {name: buffer.detach()[None] for name, buffer in changed.items()}, slopes)


def _differs(one: _Result, other: _Result, before: Tensors, shares: tuple[float, float, float]) -> str:
    """Return in what two results differ by more than these shares of loss, change of a buffer, and gradient."""
    by_loss, by_buffer, by_slope = shares
    if not _length(one.loss - other.loss) <= by_loss * _length(other.loss):
        return "the loss"
    changes = {name: _length(buffer.double() - before[name].double()) for name, buffer in other.buffers.items()}
    # A mean behind a linear layer behind batch normalisation is 0: all that it changes is what was rounded.
    every = sum(changes[name] ** 2 for name, buffer in other.buffers.items() if buffer.is_floating_point()) ** 0.5
    for name, buffer in other.buffers.items():
        far = _length(one.buffers[name].double() - buffer.double())
        if not far <= by_buffer * (changes[name] + RARELY * every) + 1e-6 * _length(before[name]):
            return f"the buffer {name}"
    apart = sum(_length(one.slopes[name] - slope) ** 2 for name, slope in other.slopes.items()) ** 0.5
    whole = sum(_length(slope) ** 2 for slope in other.slopes.values()) ** 0.5
    return "" if apart <= by_slope * whole else "the gradient"


def _length(values: Tensor) -> float:
    return float(values.detach().double().norm())
