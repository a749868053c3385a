"""Stacked tensors of K clients for the batched trainer (first axis: client), and how many clients fit into memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fedcross.client.device import memory_budget
from fedcross.client.flat_model import ModuleNet
from fedcross.client.recordings import kinds_of
from fedcross.client.trainer import host_orders
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Batch, Objective, Prepared, Tensors, Trained, Visit, flatten

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


@dataclass
class StackedState:
    """The tensors that training changes, and the learning rates.

    Attributes
    ----------
    flat, momentum : Tensor, shape (K, p)
        Parameters and momentum buffers.
    total : Tensor, shape (K,)
        Sum of losses over examples.
    lr : Tensor, shape (K, 1)
        Learning rates.
    buffers : Tensors
        Each of shape (K, ...); includes the dropout states.
    """

    flat: Tensor
    momentum: Tensor
    total: Tensor
    lr: Tensor
    buffers: Tensors

    @classmethod
    def of(cls, works: Sequence[Work]) -> StackedState:
        """Stack the initial values of `works`."""
        visits = [work.visit for work in works]
        flat = torch.stack([flatten(visit.params) for visit in visits])
        each = [{**work.visit.buffers, **work.dropout} for work in works]
        return cls(
            flat=flat,
            momentum=torch.stack([torch.zeros_like(flat[0]) if v.momentum is None else v.momentum for v in visits]),
            total=torch.zeros(len(works), dtype=flat.dtype, device=flat.device),
            lr=torch.tensor([[visit.lr] for visit in visits], dtype=flat.dtype, device=flat.device),
            buffers={name: torch.stack([buffers[name] for buffers in each]) for name in each[0]},
        )

    def params(self, like: Tensors) -> Tensors:
        """Return the parameters by name, each (K, ...) in the shapes of `like`, as views of ``flat``."""
        views, start = {}, 0
        for name, parameter in like.items():
            piece = self.flat[:, start : start + parameter.numel()]
            views[name] = piece.view(len(piece), *parameter.shape)
            start += parameter.numel()
        return views

    def part(self, who: slice | Tensor) -> StackedState:
        """Return some of the clients: views for a slice, copies for an index."""
        buffers = {name: buffer[who] for name, buffer in self.buffers.items()}
        return StackedState(self.flat[who], self.momentum[who], self.total[who], self.lr[who], buffers)

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
            momentum=self.momentum[i],
            steps=steps,
            loss=float(self.total[i]) / max(epochs * len(visit.y), 1),
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors that training changes."""
        return [self.flat, self.momentum, self.total, *self.buffers.values()]


@dataclass
class StackedPrepared:
    """Prepared values of all clients: tensors (K, ...) where ``dims`` is 0, else a value that all clients share."""

    leaves: list[Any]
    dims: list[int | None]
    spec: TreeSpec

    @classmethod
    def of(cls, prepared: Sequence[Prepared]) -> StackedPrepared:
        """Stack the prepared values of clients that :func:`alike` grouped.

        Tensors whose first axes differ (one entry per example, named in ``Objective.by_row``) are padded with zeros.
        """
        flat = [tree_flatten(each)[0] for each in prepared]
        leaves: list[Any] = []
        for column in zip(*flat):
            if isinstance(column[0], Tensor):
                leaves.append(torch.stack(_padded(column)))
            else:
                leaves.append(column[0])
        dims: list[int | None] = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
        return cls(leaves, dims, tree_flatten(prepared[0])[1])

    def part(self, who: slice | Tensor) -> StackedPrepared:
        """Return the prepared values of some of the clients."""
        chosen = [leaf if dim is None else leaf[who] for leaf, dim in zip(self.leaves, self.dims)]
        return StackedPrepared(chosen, self.dims, self.spec)

    def tree(self, leaves: list[Any]) -> Prepared:
        """Return one client's prepared values in the structure that its objective made."""
        tree: Prepared = tree_unflatten(leaves, self.spec)
        return tree


def _padded(column: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one shape, zeros at the end of the first axis where they are shorter."""
    if len({tensor.shape for tensor in column}) == 1:
        return list(column)
    longest = max(len(tensor) for tensor in column)
    return [torch.cat([t, t.new_zeros(longest - len(t), *t.shape[1:])]) for t in column]


def alike(works: Sequence[Work], by_row: frozenset[str]) -> list[list[int]]:
    """Return indices of clients that can be stacked: inputs of one kind, prepared values that fit.

    These have the same structure and constants, and tensors of the same shapes. Only tensors that `by_row` names may
    differ in their first axis: a loss reads no row of these beyond a client's own, so that padding stays unread.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, work in enumerate(works):
        groups[kinds_of(work.prepared, by_row), work.visit.inputs.kind].append(i)
    return list(groups.values())


def plan(visits: Sequence[Visit], settings: Train) -> tuple[Tensor, Tensor]:
    """Return the rows of each client in every step, int64 (steps, K, batch), and how many there are, int64 (steps, K).

    Both are on the CPU; rows after a short batch's last one are 0, and so are the counts of a client that has finished.
    """
    orders = [host_orders(visit, settings.epochs) for visit in visits]
    plans = [[rows for order in own for rows in torch.split(order, settings.batch)] for own in orders]
    longest = max(map(len, plans))
    rows = torch.zeros(longest, len(plans), settings.batch, dtype=torch.int64)
    counts = torch.zeros(longest, len(plans), dtype=torch.int64)
    for i, one in enumerate(plans):
        for t, own in enumerate(one):
            rows[t, i, : len(own)] = own
            counts[t, i] = len(own)
    return rows, counts


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
    if type(objective).ascent is not Objective.ascent:
        each += model * ASCENT_VECTORS
    return max(1, int(memory_budget(memory, visit.y.device) // max(each, 1)))
