"""All clients of a round as one computation: the loop of :mod:`client.trainer` over stacked models.

Parameters, buffers, optimiser state and prepared values of K clients are stacked; the first axis is the client. One
step is ``vmap(grad(loss))`` over that axis, then the same SGD on (K, p). Shuffles, augmentation and dropout are those
of the sequential trainer, so both trainers agree within rounding.

Clients may have different numbers of examples: step t trains those clients that have a t-th batch. Short batches are
padded and masked, so that all these clients form one group. Batch normalisation mixes the rows of a batch and must not
see padding; with it, and with whatever else mixes rows (:mod:`client.batched.padding` finds out), each step runs in
groups of equal batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from logging import WARNING

import torch
from flwr.common.logger import log
from torch.nn.modules.batchnorm import _BatchNorm

from fedcross.client.batched.captured import Together
from fedcross.client.batched.padding import counts, uneven
from fedcross.client.batched.state import StackedPrepared, StackedState, Work, alike, fitting, plan
from fedcross.client.batched.stepper import StackedStepper, Step
from fedcross.client.device import out_of_memory
from fedcross.client.flat_model import ModuleNet
from fedcross.client.graph_memory import give_back
from fedcross.client.trainer import Augment, augmentation_stream
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Objective, Trained


def train_batched(
    net: ModuleNet,
    objective: Objective,
    works: Sequence[Work],
    settings: Train,
    augment: Augment | None = None,
    *,
    memory: int | None = None,
    together: Together | None = None,
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
    together : Together, optional
        Trains clients with recorded steps, where that is possible.
    """
    results: dict[int, Trained] = {}
    for kind in alike(works, objective.by_row):
        # Clients with the most steps come first, so that the clients still training are always the head of the stack.
        ordered = sorted(kind, key=lambda i: -len(works[i].visit.y))
        one = works[ordered[0]]  # the largest: where it fits, all do
        measure = partial(fitting, net, objective, one, settings.batch, memory)
        size = (
            measure()
            if together is None
            else together.at_once(one, settings, len(kind), measure, remember=memory is None)
        )
        while ordered:
            part = ordered[:size]
            try:
                own = [works[i] for i in part]
                trained = together.train(own, settings, augment) if together is not None else None
                results |= zip(part, trained or _Stack(net, objective, own, settings).train(augment))
            except RuntimeError as error:
                if len(part) == 1 or not out_of_memory(error):
                    raise
                size = len(part) // 2
            else:
                ordered = ordered[size:]
                continue
            if together is not None:
                together.at_most(one, settings, size)
            _make_room(net.device, size)  # here, because the error above holds the tensors of the failed attempt
    return [results[i] for i in range(len(works))]


def _make_room(device: torch.device, size: int) -> None:
    """Say that `size` clients are trained at once from now on, and give torch's unused memory back."""
    log(WARNING, "fedcross: the device's memory was too small: %s clients are trained at once from now on.", size)
    give_back(device)


class _Stack:
    """Clients that train together, those with the most examples first."""

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        works: Sequence[Work],
        settings: Train,
    ) -> None:
        self.settings = settings
        self.visits = [work.visit for work in works]
        self.state = StackedState.of(works)
        self.prepared = StackedPrepared.of([work.prepared for work in works])
        self._padded = self._pads(net, objective, works)
        self._stepper = StackedStepper(
            net,
            objective,
            settings,
            self.visits[0].params,
            works[0].prepared,
            self.prepared,
            padded=self._padded,
            recorded=False,
        )

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
        return [self.state.trained(i, self.visits[i], steps, self.settings.epochs) for i, steps in enumerate(done)]

    def _pads(self, net: ModuleNet, objective: Objective, works: Sequence[Work]) -> bool:
        """Return whether batches of several lengths are padded to one."""
        if any(isinstance(part, _BatchNorm) for part in net.module.modules()):
            return False
        if len({len(visit.y) for visit in self.visits}) == 1 or not uneven(self.visits, self.settings.batch):
            return True  # there is nothing to pad
        return not counts(net, objective, works[0], self.settings, recorded=False)

    def _steps(self) -> Iterator[tuple[int, list[int], Step]]:
        """Yield the number, the members and the batches of every step."""
        size, device = self.settings.batch, self.state.flat.device
        rows, self._counts = plan(self.visits, self.settings)
        masks = (torch.arange(size) < self._counts[:, :, None]).to(device, self.state.flat.dtype)
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
        active = [i for i, count in enumerate(counts) if count]
        if self._padded:
            return [(active, max(counts))]
        widths = sorted({counts[i] for i in active}, reverse=True)
        return [([i for i in active if counts[i] == width], width) for width in widths]

    def _take(self, members: list[int], step: Step) -> None:
        """Run one step of `members`."""
        if _is_head(members):
            head = slice(len(members))
            self._stepper.advance(self.state.part(head), self.prepared.part(head), step)
        else:
            at = torch.tensor(members, device=self.state.flat.device)
            state = self.state.part(at)
            self._stepper.advance(state, self.prepared.part(at), step)
            self.state.put(at, state)


def _is_head(members: list[int]) -> bool:
    return members == list(range(len(members)))
