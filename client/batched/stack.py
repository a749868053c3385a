"""Stacked tensors of K clients (first axis: client), their common step, and how many clients fit into memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from fedcross.client.device import memory_budget
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import Compiled, Moments
from fedcross.client.trainer import step as take_step
from fedcross.conf.schema import Train
from fedcross.strategies.objective import Batch, Objective, Prepared, Tensors, Trained, Visit, flatten

#: Factor on the counted tensors, for the gradients of activations and for workspaces.
SLACK = 2.0
#: Vectors of the model's size during a step: parameters, gradient, its copy, momentum, the update.
VECTORS = 6
#: Further ones of an objective that takes its gradient elsewhere: the way, the point, the second gradient.
ASCENT_VECTORS = 3


@dataclass(frozen=True)
class Work:
    """One client's part in a batched round: its visit, what ``prepare`` returned, and its dropout states."""

    visit: Visit
    prepared: Prepared
    dropout: Tensors


@dataclass(frozen=True)
class Step:
    """The batches of k clients: inputs (k, width, ...), labels, mask of real rows, and rows of ``visit.inputs``."""

    number: int
    x: Tensor
    y: Tensor
    mask: Tensor
    rows: Tensor


@dataclass
class StackedState:
    """The tensors that training changes, and the learning rates.

    Attributes
    ----------
    flat : Tensor, shape (K, p)
        Parameters.
    moments : Moments, shapes (K, p)
        State of the optimiser.
    total : Tensor, shape (K,)
        Sum of losses over examples.
    lr, steps : Tensor, shape (K, 1)
        Learning rates, and numbers of steps of the visits.
    buffers : Tensors
        Each of shape (K, ...); includes the dropout states.
    """

    flat: Tensor
    moments: Moments
    total: Tensor
    lr: Tensor
    steps: Tensor
    buffers: Tensors

    @classmethod
    def of(cls, works: Sequence[Work], settings: Train) -> StackedState:
        """Stack the initial values of `works`."""
        visits = [work.visit for work in works]
        flat = torch.stack([flatten(visit.params) for visit in visits])
        moments = Moments.of(flat, settings)
        for i, visit in enumerate(visits):
            if visit.momentum is not None:
                moments.first[i] = visit.momentum
        each = [{**work.visit.buffers, **work.dropout} for work in works]
        return cls(
            flat=flat,
            moments=moments,
            total=torch.zeros(len(works), dtype=flat.dtype, device=flat.device),
            lr=torch.tensor([[visit.lr] for visit in visits], dtype=flat.dtype, device=flat.device),
            steps=torch.tensor([[settings.epochs * -(-len(v.y) // settings.batch)] for v in visits]).to(flat),
            buffers={name: torch.stack([buffers[name] for buffers in each]) for name in each[0]},
        )

    def params(self, like: Tensors) -> Tensors:
        """Return the parameters by name, each (K, ...) in the shapes of `like`, as views of ``flat``."""
        pieces = torch.split(self.flat, [parameter.numel() for parameter in like.values()], 1)
        return {name: piece.view(len(piece), *p.shape) for (name, p), piece in zip(like.items(), pieces)}

    def part(self, who: slice | Tensor) -> StackedState:
        """Return some of the clients: views for a slice, copies for an index."""
        moments = Moments(self.moments.first[who], self.moments.second[who])
        buffers = {name: buffer[who] for name, buffer in self.buffers.items()}
        return StackedState(self.flat[who], moments, self.total[who], self.lr[who], self.steps[who], buffers)

    def put(self, at: Tensor, part: StackedState) -> None:
        """Write the values of some clients back."""
        for whole, piece in zip(self.tensors(), part.tensors()):
            whole[at] = piece

    def trained(self, i: int, visit: Visit, steps: int, epochs: int) -> Trained:
        """Return the result of client `i`, as views."""
        return Trained(
            params={name: stack[i] for name, stack in self.params(visit.params).items()},
            buffers={name: self.buffers[name][i] for name in visit.buffers},
            flat=self.flat[i],
            momentum=self.moments.first[i],
            steps=steps,
            loss=float(self.total[i]) / max(epochs * len(visit.y), 1),
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors that training changes."""
        return [self.flat, self.moments.first, self.moments.second, self.total, *self.buffers.values()]


class StackedPrepared:
    """Prepared values of all clients: tensors (K, ...), and values that all clients share.

    Attributes
    ----------
    tree : Prepared
        In the structure that the objective made.
    dims : Prepared
        The same structure: 0 for a tensor, None for a shared value.
    """

    def __init__(self, tree: Prepared) -> None:
        self.tree = tree
        self.dims: Prepared = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, tree)

    @classmethod
    def of(cls, prepared: Sequence[Prepared]) -> StackedPrepared:
        """Stack the prepared values of clients that :func:`alike` grouped.

        Tensors whose first axes differ (one entry per example, named in ``Objective.by_row``) are padded with zeros.
        """
        columns = zip(*(tree_flatten(each)[0] for each in prepared))
        leaves = [torch.stack(_padded(column)) if isinstance(column[0], Tensor) else column[0] for column in columns]
        return cls(tree_unflatten(leaves, tree_flatten(prepared[0])[1]))

    def part(self, who: slice | Tensor) -> StackedPrepared:
        """Return the prepared values of some of the clients."""
        return StackedPrepared(tree_map(lambda leaf: leaf[who] if isinstance(leaf, Tensor) else leaf, self.tree))


def _padded(column: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one shape, zeros at the end of the first axis where they are shorter."""
    if len({tensor.shape for tensor in column}) == 1:
        return list(column)
    longest = max(len(tensor) for tensor in column)
    return [torch.cat([t, t.new_zeros(longest - len(t), *t.shape[1:])]) for t in column]


def slopes_of(net: ModuleNet, objective: Objective, *, padded: bool) -> Callable[..., Any]:
    """Return a function of stacked tensors that computes losses (k,), new buffers and gradients by name (k, ...).

    `padded` says whether batches have padding, which the objective leaves out.
    """

    def one(p: Tensors, b: Tensors, prepared: Prepared, number: Any, *batch: Tensor) -> tuple[Tensor, Tensors]:
        x, y, mask, rows = batch
        changed = {name: buffer.clone() for name, buffer in b.items()}
        given = Batch(x, y, mask if padded else None, rows, number)
        return objective.loss(net, p, changed, given, prepared), changed

    def slopes(
        params: Tensors, buffers: Tensors, prepared: Prepared, dims: Prepared, number: Any, *batch: Tensor
    ) -> Any:
        over = (0, 0, dims, None, *[0] * len(batch))
        found, (losses, fresh) = vmap(grad_and_value(one, has_aux=True), over)(
            params, buffers, prepared, number, *batch
        )
        return losses, fresh, found

    return slopes


class StackedStepper:
    """The step of a method on a network.

    Parameters
    ----------
    net, objective, settings
        As for :func:`client.batched.trainer.train_batched`.
    one : Work
        One of the clients, for shapes.
    slopes : callable
        :func:`slopes_of`, called or compiled.
    """

    def __init__(
        self, net: ModuleNet, objective: Objective, settings: Train, one: Work, slopes: Callable[..., Any]
    ) -> None:
        self._settings, self._slopes, self._rate = settings, slopes, objective.rate
        self._like, self._device = one.visit.params, net.device
        #: A compiled function would keep a number.
        self._as_tensor = isinstance(slopes, Compiled)
        # Both may return None, which vmap cannot.
        flat, ascent, gradient = flatten(one.visit.params), objective.ascent, objective.gradient
        ascends = ascent is not None and ascent(flat, torch.zeros_like(flat), one.prepared) is not None
        self._ascent: Callable[..., Any] | None = ascent if ascends else None
        self._term = gradient if gradient and gradient(flat, one.prepared) is not None else None

    def advance(self, state: StackedState, prepared: StackedPrepared, step: Step, trains: Tensor | None = None) -> None:
        """Run one step in place on `state`, which holds exactly the clients of `step`.

        Clients for which `trains`, bool (k,), is false stay as they are.
        """
        held = None if trains is None else [tensor.clone() for tensor in state.tensors()]
        losses, fresh, gradient = self._gradient(state.params(self._like), state.buffers, prepared, step)
        if self._ascent:
            way = vmap(self._ascent, (0, 0, prepared.dims))(state.flat, gradient, prepared.tree)
            there = replace(state, flat=state.flat + way).params(self._like)
            gradient = self._gradient(there, state.buffers, prepared, step)[2]
        term = vmap(self._term, (0, prepared.dims))(state.flat, prepared.tree) if self._term else None
        lr = state.lr * self._rate(step.number, state.steps) if self._rate else state.lr
        take_step(state.flat, gradient, state.moments, lr, self._settings, step.number, term)
        state.total.add_(losses * step.mask.sum(1))
        for name, buffer in state.buffers.items():
            buffer.copy_(fresh[name])
        if trains is not None and held is not None:
            for now, old in zip(state.tensors(), held):
                now.copy_(torch.where(trains.view(-1, *[1] * (now.dim() - 1)), now, old))

    def _gradient(
        self, params: Tensors, buffers: Tensors, prepared: StackedPrepared, step: Step
    ) -> tuple[Tensor, Tensors, Tensor]:
        """Return losses (k,), new buffers and the gradient (k, p); they are copies."""
        number = torch.tensor(step.number, device=self._device) if self._as_tensor else step.number
        batch = step.x, step.y, step.mask, step.rows
        losses, fresh, slopes = self._slopes(params, buffers, prepared.tree, prepared.dims, number, *batch)
        gradient = torch.cat([slopes[name].reshape(len(losses), -1) for name in params], 1)
        if self._as_tensor:  # the next call overwrites what a compiled function returned
            losses, fresh = losses.clone(), {name: buffer.clone() for name, buffer in fresh.items()}
        return losses, fresh, gradient


def alike(works: Sequence[Work], by_row: frozenset[str]) -> list[list[int]]:
    """Return indices of clients that can be stacked: inputs of one kind, prepared values that fit.

    These have the same structure and constants, and tensors of the same shapes. Only tensors that `by_row` names may
    differ in their first axis: a loss reads no row of these beyond a client's own, so that padding stays unread.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, work in enumerate(works):
        groups[_kinds(work.prepared, by_row), work.visit.inputs.kind].append(i)
    return list(groups.values())


def _kinds(prepared: Prepared, by_row: frozenset[str]) -> Hashable:
    """Return structure, constants, shapes and types of prepared values; other objects are equal to themselves only."""
    leaves, spec = tree_flatten_with_path(prepared)
    kinds: list[Hashable] = []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            rows = bool(path) and getattr(path[0], "key", None) in by_row
            kinds.append((leaf.shape[int(rows) :], leaf.dtype))
        else:
            kinds.append((type(leaf), leaf if isinstance(leaf, bool | int | float | str | None) else id(leaf)))
    return str(spec), tuple(kinds)


def fitting(net: ModuleNet, objective: Objective, work: Work, batch: int, memory: int | None) -> int:
    """Return how many clients like `work` fit into `memory` bytes (default: what the device has), at least one.

    Computes the loss of one batch and counts the bytes that autograd keeps for the backward pass.
    """
    visit = work.visit
    x, y = visit.inputs[:batch], visit.y[:batch]
    rows = -(-batch // len(y))  # scales up a client with fewer examples than a batch
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    params = {name: p.detach().requires_grad_() for name, p in visit.params.items()}
    buffers = {name: b.clone() for name, b in {**visit.buffers, **work.dropout}.items()}
    with saved_tensors_hooks(count, lambda tensor: tensor):
        objective.loss(net, params, buffers, Batch(x, y), work.prepared)
    model = sum(p.nbytes for p in params.values())
    own = sum(t.nbytes for t in tree_leaves(work.prepared) if isinstance(t, Tensor))
    own += 2 * visit.inputs.nbytes  # where they lie, and in the stack
    each = sum(kept.values()) * rows * SLACK + model * VECTORS + own
    if objective.ascent:
        each += model * ASCENT_VECTORS
    return max(1, int(memory_budget(memory, visit.y.device) // max(each, 1)))
