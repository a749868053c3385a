"""All clients of a round as one computation: the loop of :mod:`client.trainer` over stacked models.

Parameters, buffers, optimiser state and prepared values of K clients are stacked; the first axis is the client. One
step is ``vmap(grad(loss))`` over that axis, then the same optimiser on (K, p). Shuffles, augmentation and dropout are
those of the sequential trainer, so both trainers agree within rounding.

Clients may have different numbers of examples: step t trains those clients that have a t-th batch. Short batches are
padded and masked, so that all these clients form one group. Batch normalisation mixes the rows of a batch and must not
see padding; with it, and with whatever mixes rows (:mod:`client.batched.padding` finds out), each step runs in groups
of equal batch size. A compiled step has one shape: clients that have finished take part, and their results are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from logging import WARNING

import torch
from flwr.common.logger import log
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedcross.client.batched.padding import counts, uneven
from fedcross.client.batched.stack import (
    StackedPrepared,
    StackedState,
    StackedStepper,
    Step,
    Work,
    alike,
    fitting,
    slopes_of,
)
from fedcross.client.device import free_unused, out_of_memory
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import Augment, Compiled, augmentation_stream, orders
from fedcross.conf.schema import Train
from fedcross.strategies.objective import Objective, Trained, Visit


def train_batched(
    net: ModuleNet,
    objective: Objective,
    works: Sequence[Work],
    settings: Train,
    augment: Augment | None = None,
    *,
    memory: int | None = None,
    compiled: Compiled | None = None,
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
    compiled : Compiled, optional
        :func:`client.batched.stack.slopes_of` with padding, for stacks whose batches may be padded.
    """
    results: dict[int, Trained] = {}
    for kind in alike(works, objective.by_row):
        # Clients with the most steps come first, so that the clients still training are always the head of the stack.
        ordered = sorted(kind, key=lambda i: -len(works[i].visit.y))
        size = fitting(net, objective, works[ordered[0]], settings.batch, memory)  # the largest: where it fits, all do
        while ordered:
            part = ordered[:size]
            try:
                stack = _Stack(net, objective, [works[i] for i in part], settings, compiled)
                results |= zip(part, stack.train(augment))
                ordered = ordered[size:]
                continue
            except RuntimeError as error:
                if len(part) == 1 or not out_of_memory(error):
                    raise
            size = len(part) // 2  # outside of the handler, whose error holds the tensors of the failed attempt
            log(WARNING, "fedcross: the device's memory was too small: %s clients are trained at once now.", size)
            free_unused(net.device)
    return [results[i] for i in range(len(works))]


class _Stack:
    """Clients that train together, those with the most examples first."""

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        works: Sequence[Work],
        settings: Train,
        compiled: Compiled | None,
    ) -> None:
        self.settings = settings
        self.visits = [work.visit for work in works]
        self.state = StackedState.of(works, settings)
        self.prepared = StackedPrepared.of([work.prepared for work in works])
        self._padded = self._pads(net, objective, works)
        #: Whether every step has all clients and full width, as a compiled function needs.
        self._one_shape = self._padded and compiled is not None and not compiled.refused
        slopes = (
            compiled if self._one_shape and compiled is not None else slopes_of(net, objective, padded=self._padded)
        )
        self._stepper = StackedStepper(net, objective, settings, works[0], slopes)

    def train(self, augment: Augment | None) -> list[Trained]:
        """Run all steps and return the results."""
        generators = [augmentation_stream(visit) for visit in self.visits]
        done = [0] * len(self.visits)
        for t, members, step in self._steps():
            own = self._counts[t].tolist()
            for place, i in enumerate(members):
                done[i] += bool(own[i])
                if augment is not None and own[i]:
                    step.x[place, : own[i]] = augment(step.x[place, : own[i]], generators[i])
            self._take(members, step, own)
        return [self.state.trained(i, self.visits[i], steps, self.settings.epochs) for i, steps in enumerate(done)]

    def _pads(self, net: ModuleNet, objective: Objective, works: Sequence[Work]) -> bool:
        """Return whether batches of several lengths are padded to one."""
        if any(isinstance(part, _BatchNorm) for part in net.module.modules()):
            return False
        if len({len(visit.y) for visit in self.visits}) == 1 or not uneven(self.visits, self.settings.batch):
            return True  # there is nothing to pad
        return not counts(net, objective, works[0], self.settings)

    def _steps(self) -> Iterator[tuple[int, list[int], Step]]:
        """Yield the number, the members and the batches of every step."""
        size, device = self.settings.batch, self.state.flat.device
        rows, self._counts = plan(self.visits, self.settings)
        shown = self._counts.clamp(min=1) if self._one_shape else self._counts  # a mean over no rows is no number
        masks = (torch.arange(size) < shown[:, :, None]).to(device, self.state.flat.dtype)
        rows = rows.to(device)
        like, held = self.visits[0].inputs, torch.cat([v.inputs.held for v in self.visits])
        y = torch.cat([v.y for v in self.visits])
        first = torch.tensor([0, *(len(v.y) for v in self.visits[:-1])], device=device).cumsum(0)
        for t in range(len(rows)):
            for members, width in self._groups(self._counts[t].tolist()):
                who: slice | list[int] = slice(len(members)) if _is_head(members) else members
                own = rows[t, who, :width]
                at = (own + first[who, None]).reshape(-1)
                shape = (len(members), width)
                inputs = like.ready(held.index_select(0, at)).view(*shape, *held.shape[1:])
                yield t, members, Step(t, inputs, y[at].view(shape), masks[t, who, :width], own)

    def _groups(self, counts: list[int]) -> list[tuple[list[int], int]]:
        """Return groups of clients for one step, each with the width of its batch."""
        if self._one_shape:
            return [(list(range(len(counts))), self.settings.batch)]
        active = [i for i, count in enumerate(counts) if count]
        if self._padded:
            return [(active, max(counts))]
        widths = sorted({counts[i] for i in active}, reverse=True)
        return [([i for i in active if counts[i] == width], width) for width in widths]

    def _take(self, members: list[int], step: Step, counts: list[int]) -> None:
        """Run one step of `members`."""
        if self._one_shape:
            trains = None if all(counts) else torch.tensor(counts, device=self.state.flat.device) > 0
            self._stepper.advance(self.state, self.prepared, step, trains)
        elif _is_head(members):
            head = slice(len(members))
            self._stepper.advance(self.state.part(head), self.prepared.part(head), step)
        else:
            at = torch.tensor(members, device=self.state.flat.device)
            state = self.state.part(at)
            self._stepper.advance(state, self.prepared.part(at), step)
            self.state.put(at, state)


def plan(visits: Sequence[Visit], settings: Train) -> tuple[Tensor, Tensor]:
    """Return the rows of each client in every step, int64 (steps, K, batch), and how many there are, int64 (steps, K).

    Both are on the CPU; rows after a short batch's last one are 0, and so are the counts of a client that has finished.
    """
    plans = [
        [rows for order in orders(visit, settings.epochs) for rows in torch.split(order, settings.batch)]
        for visit in visits
    ]
    longest = max(map(len, plans))
    rows = torch.zeros(longest, len(plans), settings.batch, dtype=torch.int64)
    counts = torch.zeros(longest, len(plans), dtype=torch.int64)
    for i, one in enumerate(plans):
        for t, own in enumerate(one):
            rows[t, i, : len(own)] = own
            counts[t, i] = len(own)
    return rows, counts


def _is_head(members: list[int]) -> bool:
    return members == list(range(len(members)))
