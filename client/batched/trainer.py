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
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedcross.client.batched.state import StackedPrepared, StackedState, Work, alike, fitting
from fedcross.client.cuda_graphs import Record, Replay
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import Augment, augmentation_stream, host_orders
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
    record: Record | None = None,
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
    record : callable, optional
        Takes the place of recording a CUDA graph (:class:`client.cuda_graphs.Replay`), on any device.
    """
    results: dict[int, Trained] = {}
    for kind in alike(works):
        size = fitting(net, objective, works[kind[0]], settings.batch, memory)
        # Clients with the most steps come first, so that the clients still training are always the head of the stack.
        ordered = sorted(kind, key=lambda i: -len(works[i].visit.y))
        while ordered:
            part = ordered[:size]
            try:
                stack = _Stack(net, objective, [works[i] for i in part], settings, graph, record)
                results |= zip(part, stack.train(augment))
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
                size = len(part) // 2
            else:
                ordered = ordered[size:]
                continue
            _make_room(net.device, size)  # here, because the error above holds the tensors of the failed attempt
    return [results[i] for i in range(len(works))]


def _make_room(device: torch.device, size: int) -> None:
    """Say that `size` clients are trained at once from now on, and give torch's unused memory back."""
    log(WARNING, "fedcross: the device's memory was too small: %s clients are trained at once from now on.", size)
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Step:
    """The batches of k clients: inputs (k, width, ...), labels, mask of real rows, and rows of ``visit.x``."""

    number: int | Tensor
    x: Tensor
    y: Tensor
    mask: Tensor
    rows: Tensor

    def as_tensor(self) -> Tensor:
        """Return the step's number as a tensor, which a graph does not freeze."""
        return torch.as_tensor(self.number, device=self.x.device)


class _Stack:
    """Clients that train together, those with the most examples first."""

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        works: Sequence[Work],
        settings: Train,
        graph: bool,
        record: Record | None,
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
        if graph and self._padded and (self.state.flat.is_cuda or record is not None):
            self._replay = Replay(self._head, self.state.tensors(), record)

    def train(self, augment: Augment | None) -> list[Trained]:
        """Run all steps and return the results."""
        generators = [augmentation_stream(visit) for visit in self.visits]
        done = [0] * len(self.visits)
        for t, members, step in self._steps():
            if augment is not None:
                for place, i in enumerate(members):
                    count = int(self._counts[t, i])
                    step.x[place, :count] = augment(step.x[place, :count], generators[i])
            self._take(members, step)
            for i in members:
                done[i] += 1
        return [self._trained(i, steps) for i, steps in enumerate(done)]

    def _steps(self) -> Iterator[tuple[int, list[int], _Step]]:
        """Yield the number, the members and the batches of every step."""
        size, device = self.settings.batch, self.state.flat.device
        orders_of = [list(host_orders(v, self.settings.epochs)) for v in self.visits]
        plans = [[rows for order in own for rows in torch.split(order, size)] for own in orders_of]
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
        numbers: Sequence[int | Tensor] = range(longest)
        if self._replay is not None:
            numbers = torch.arange(longest, device=device).unbind()
        for t, number in enumerate(numbers):
            for members, width in self._groups(self._counts[t].tolist()):
                who: slice | list[int] = slice(len(members)) if _is_head(members) else members
                own = rows[t, who, :width]
                at = (own + first[who, None]).reshape(-1)
                shape = (len(members), width)
                inputs = x.index_select(0, at).view(*shape, *x.shape[1:])
                yield t, members, _Step(number, inputs, y[at].view(shape), masks[t, who, :width], own)

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
            self._replay(step.as_tensor(), step.x, step.y, step.mask, step.rows)
        else:
            self._head(step.number, step.x, step.y, step.mask, step.rows)

    def _head(self, number: int | Tensor, x: Tensor, y: Tensor, mask: Tensor, rows: Tensor) -> None:
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
