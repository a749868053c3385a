"""All clients of a round as one computation: the loop of :mod:`client.trainer` over stacked models.

Parameters, buffers, optimiser state and prepared values of K clients are stacked; the first axis is the client. One
step is ``vmap(grad(loss))`` over that axis, then the same SGD on (K, p). Shuffles, augmentation and dropout are those
of the sequential trainer, so both trainers agree within rounding.

Clients may have different numbers of examples: step t trains those clients that have a t-th batch. Short batches are
padded and masked, so that all these clients form one group. Batch normalisation mixes the rows of a batch and must not
see padding; with it, each step runs in groups of equal batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedcross.client.batched.cuda_graphs import Replay
from fedcross.client.batched.state import StackedPrepared, StackedState, Work, alike, fitting
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import Augment, augmentation_stream, orders
from fedcross.client.trainer import step as sgd_step
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Batch, Objective, Tensors, Trained, Visit


def train_batched(
    net: ModuleNet,
    objective: Objective,
    works: Sequence[Work],
    settings: Train,
    augment: Augment | None = None,
    *,
    memory: int | None = None,
    graph: bool = False,
) -> list[Trained]:
    """Train the models of all `works` and return the results in order.

    Parameters
    ----------
    net : ModuleNet
        The network's functions; its own weights are not used.
    objective : Objective
        An objective with ``batchable = True``.
    works : sequence of Work
        Each starts from its ``visit.params`` and ``visit.buffers``.
    settings : Train
        As for :func:`client.trainer.train`.
    augment : callable or None
        Called for each client with its own generator, as the sequential trainer does.
    memory : int, optional
        Most bytes that the stacks may use; clients that do not fit are trained after the others.
    graph : bool
        Whether steps are replayed as CUDA graphs (only on a GPU, only without batch normalisation).
    """
    results: dict[int, Trained] = {}
    for kind in alike(works):
        size = fitting(net, objective, works[kind[0]], settings.batch, memory)
        # Clients with the most steps come first, so that the clients still training are always the head of the stack.
        ordered = sorted(kind, key=lambda i: -len(works[i].visit.y))
        for start in range(0, len(ordered), size):
            part = ordered[start : start + size]
            stack = _Stack(net, objective, [works[i] for i in part], settings, graph)
            results |= zip(part, stack.train(augment))
    return [results[i] for i in range(len(works))]


@dataclass(frozen=True)
class _Step:
    """The batches of k clients: inputs (k, width, ...), labels, mask of real rows, and rows of ``visit.x``."""

    number: int
    x: Tensor
    y: Tensor
    mask: Tensor
    rows: Tensor


class _Stack:
    """Clients that train together, those with the most examples first."""

    def __init__(
        self, net: ModuleNet, objective: Objective, works: Sequence[Work], settings: Train, graph: bool
    ) -> None:
        self.net, self.objective, self.settings = net, objective, settings
        self.visits = [work.visit for work in works]
        self.state = StackedState.of(works)
        self.prepared = StackedPrepared.of([work.prepared for work in works])
        # `gradient` returns None for a method without a closed-form term, and vmap cannot return None.
        self._has_term = objective.gradient(self.state.flat[0], works[0].prepared) is not None
        still = torch.zeros_like(self.state.flat[0])
        self._ascends = objective.ascent(self.state.flat[0], still, works[0].prepared) is not None
        self._padded = not any(isinstance(m, _BatchNorm) for m in net.module.modules())
        self._replay: Replay | None = None
        if graph and self._padded and self.state.flat.is_cuda:
            self._replay = Replay(self._head, self.state.tensors())

    def train(self, augment: Augment | None) -> list[Trained]:
        """Run all steps and return the results."""
        generators = [augmentation_stream(visit) for visit in self.visits]
        done = [0] * len(self.visits)
        for members, step in self._steps():
            if augment is not None:
                for place, i in enumerate(members):
                    count = int(self._counts[step.number, i])
                    step.x[place, :count] = augment(step.x[place, :count], generators[i])
            self._take(members, step)
            for i in members:
                done[i] += 1
        return [self._trained(i, steps) for i, steps in enumerate(done)]

    def _steps(self) -> Iterator[tuple[list[int], _Step]]:
        """Yield the members and batches of every step."""
        size, device = self.settings.batch, self.state.flat.device
        plans = [[rows for o in orders(v, self.settings.epochs) for rows in torch.split(o, size)] for v in self.visits]
        longest = len(plans[0])
        rows = torch.zeros(longest, len(plans), size, dtype=torch.int64)
        self._counts = torch.zeros(longest, len(plans), dtype=torch.int64)
        for i, plan in enumerate(plans):
            for t, own in enumerate(plan):
                rows[t, i, : len(own)] = own
                self._counts[t, i] = len(own)
        masks = (torch.arange(size) < self._counts[:, :, None]).to(device, self.state.flat.dtype)
        rows = rows.to(device)
        x = torch.cat([v.x for v in self.visits])
        y = torch.cat([v.y for v in self.visits])
        first = torch.tensor([0, *(len(v.y) for v in self.visits[:-1])], device=device).cumsum(0)
        for t in range(longest):
            for members, width in self._groups(self._counts[t].tolist()):
                who: slice | list[int] = slice(len(members)) if _is_head(members) else members
                own = rows[t, who, :width]
                at = (own + first[who, None]).reshape(-1)
                shape = (len(members), width)
                inputs = x.index_select(0, at).view(*shape, *x.shape[1:])
                yield members, _Step(t, inputs, y[at].view(shape), masks[t, who, :width], own)

    def _groups(self, counts: list[int]) -> list[tuple[list[int], int]]:
        """Return groups of clients for one step, each with the width of its batch."""
        active = [i for i, count in enumerate(counts) if count]
        if self._padded:
            return [(active, max(counts) if self._replay is None else self.settings.batch)]
        widths = sorted({counts[i] for i in active}, reverse=True)
        return [([i for i in active if counts[i] == width], width) for width in widths]

    def _take(self, members: list[int], step: _Step) -> None:
        """Run one step of `members`."""
        if not _is_head(members):
            at = torch.tensor(members, device=self.state.flat.device)
            state = self.state.part(at)
            self._advance(state, self.prepared.part(at), step)
            self.state.put(at, state)
        elif self._replay is not None:
            self._replay(step.number, step.x, step.y, step.mask, step.rows)
        else:
            self._head(step.number, step.x, step.y, step.mask, step.rows)

    def _head(self, number: int, x: Tensor, y: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Run one step of the first clients, in place."""
        head = slice(len(x))
        self._advance(self.state.part(head), self.prepared.part(head), _Step(number, x, y, mask, rows))

    def _advance(self, state: StackedState, prepared: StackedPrepared, step: _Step) -> None:
        """Run one step in place on `state`, which holds exactly the clients of `step`."""
        params = state.params(self.visits[0].params)
        losses, slopes, fresh = self._slopes(params, state.buffers, prepared, step)
        gradient = torch.cat([slopes[name].reshape(len(losses), -1) for name in params], 1)
        if self._ascends:
            way = vmap(self._ascent, (0, 0, prepared.dims))(state.flat, gradient, prepared.leaves)
            there = replace(state, flat=state.flat + way).params(self.visits[0].params)
            _, slopes, _ = self._slopes(there, state.buffers, prepared, step)
            gradient = torch.cat([slopes[name].reshape(len(losses), -1) for name in params], 1)
        term = vmap(self._term, (0, prepared.dims))(state.flat, prepared.leaves) if self._has_term else None
        sgd_step(state.flat, gradient, state.momentum, state.lr, self.settings, term)
        for name, buffer in state.buffers.items():
            buffer.copy_(fresh[name])
        state.total.add_(losses * step.mask.sum(1))

    def _slopes(
        self, params: Tensors, buffers: Tensors, prepared: StackedPrepared, step: _Step
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Return losses (k,), gradients by name (k, ...) and the new buffers."""

        def loss(
            p: Tensors,
            b: Tensors,
            x: Tensor,
            y: Tensor,
            mask: Tensor,
            rows: Tensor,
            leaves: list[Any],
        ) -> tuple[Tensor, Tensors]:
            changed = {name: buffer.clone() for name, buffer in b.items()}
            batch = Batch(x, y, mask if self._padded else None, rows, step.number)
            return self.objective.loss(self.net, p, changed, batch, self.prepared.tree(leaves)), changed

        mapped = vmap(grad_and_value(loss, has_aux=True), (0, 0, 0, 0, 0, 0, prepared.dims))
        slopes, (losses, fresh) = mapped(params, buffers, step.x, step.y, step.mask, step.rows, prepared.leaves)
        return losses, slopes, fresh

    def _term(self, flat: Tensor, leaves: list[Any]) -> Tensor:
        term = self.objective.gradient(flat, self.prepared.tree(leaves))
        return term if term is not None else torch.zeros_like(flat)

    def _ascent(self, flat: Tensor, gradient: Tensor, leaves: list[Any]) -> Tensor:
        way = self.objective.ascent(flat, gradient, self.prepared.tree(leaves))
        return way if way is not None else torch.zeros_like(flat)

    def _trained(self, i: int, steps: int) -> Trained:
        visit: Visit = self.visits[i]
        seen = self.settings.epochs * len(visit.y)
        return Trained(
            params={name: stack[i] for name, stack in self.state.params(visit.params).items()},
            buffers={name: self.state.buffers[name][i] for name in visit.buffers},
            flat=self.state.flat[i],
            momentum=self.state.momentum[i],
            steps=steps,
            loss=float(self.state.total[i]) / max(seen, 1),
        )


def _is_head(members: list[int]) -> bool:
    return members == list(range(len(members)))
