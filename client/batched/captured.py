"""Clients of a round on a GPU: one step of all of them recorded as a CUDA graph, replayed for every round.

As :mod:`client.captured`, with the client as first axis. All steps have one shape: short batches are padded, batch
normalisation leaves the padding out (:mod:`client.batched.masked_norm`), and a client that has finished takes part with
made-up rows, whose result is thrown away. Where padding would count (:mod:`client.batched.padding`), nothing is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fedcross.client.batched.padding import counts, uneven
from fedcross.client.batched.state import StackedPrepared, StackedState, Work, plan
from fedcross.client.batched.stepper import StackedStepper, Step
from fedcross.client.cuda_graphs import Record, Replay
from fedcross.client.device import breaks_device, out_of_memory
from fedcross.client.flat_model import ModuleNet
from fedcross.client.graph_memory import give_back
from fedcross.client.outside import Outside
from fedcross.client.recordings import Key, Recorder, kinds_of, rows_of_plan, steps
from fedcross.client.trainer import Augment, augmentation_stream
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Objective, Trained, Visit


class Together(Recorder["_Stage"]):
    """Trains groups of clients with recorded steps; lives as long as the net."""

    def __init__(self, net: ModuleNet, objective: Objective, examples: int = 0, record: Record | None = None) -> None:
        super().__init__(net, objective, examples, record)
        self._at_once: dict[Hashable, int] = {}
        self._most: dict[Hashable, int] = {}

    def at_once(
        self, work: Work, settings: Train, wanted: int, measure: Callable[[], int], *, remember: bool = True
    ) -> int:
        """Return how many clients like `work` train at once: as many in every round, so that one recording serves all.

        Parameters
        ----------
        work : Work
            One of the clients.
        settings : Train
            Settings of the optimiser.
        wanted : int
            How many there are.
        measure : callable
            Returns how many fit into the device's memory now. Older recordings are given up if these are too few.
        remember : bool
            Whether to measure only once; a recording is among what takes memory at the second time.
        """
        kind = _like(work, settings)
        found = self._at_once.get(kind) if remember else None
        if found is None:
            found = measure()
            if found < wanted and self._recordings.release_all():
                found = measure()
            self._at_once[kind] = found
        return min(found, self._most.get(kind, found))

    def at_most(self, work: Work, settings: Train, count: int) -> None:
        """Train at most `count` clients like `work` at once from now on, because the memory was too small for more."""
        self._most[_like(work, settings)] = count

    def train(self, works: Sequence[Work], settings: Train, augment: Augment | None) -> list[Trained] | None:
        """Train the models of `works`, whose prepared values can be stacked; None if steps are not recorded.

        Raises
        ------
        RuntimeError
            If the memory is too small for several clients; for one client alone, steps are recorded no more.
        """
        try:
            return self._train(works, settings, augment)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self._recordings.release_all()  # this one does not fit, and the others are in its way
            if len(works) > 1:
                raise
        self._recordings.refuse("the device's memory is too small for a recorded step")
        give_back(self._net.device)  # here, because the error above holds the tensors of the failed attempt
        return None

    def _train(self, works: Sequence[Work], settings: Train, augment: Augment | None) -> list[Trained] | None:
        if not all(self._records(work.prepared) for work in works):
            return None
        visits = [work.visit for work in works]
        if uneven(visits, settings.batch):
            reason = counts(self._net, self._objective, works[0], settings, recorded=True)
            if reason:
                self._recordings.refuse(reason)
                return None
        stacked = StackedPrepared.of([work.prepared for work in works])

        def key() -> Key:
            kinds = kinds_of(works[0].prepared, self._objective.by_row)  # all have the same: they were stacked
            return (_fixed(works[0], settings), augment is not None, kinds), len(works)

        def make() -> _Stage:
            room = max(self._examples, *(len(visit.y) for visit in visits))
            return _Stage(
                self._net,
                self._objective,
                works,
                stacked,
                settings,
                augmented=augment is not None,
                room=room,
                record=self._record,
            )

        values = [work.prepared for work in works]
        stage = self._recordings.take(key, {"all": values}, lambda s: s.fits(visits, stacked, settings.epochs), make)
        if stage is None:
            return None
        back = stage.replay.keep()
        try:
            trained = stage.train(works, stacked, settings, augment)
        except Exception as error:  # whatever a method raises: unrecorded stacks show whether it does there too
            if back is not None:
                back()
            if out_of_memory(error) or breaks_device(error):
                raise
            self._recordings.give_up(stage, error)
            return None
        self._recordings.look_at(stage)
        if not stage.replay.differs:
            return trained
        if back is not None:
            back()
        return None


def _fixed(work: Work, settings: Train) -> Hashable:
    return settings.batch, settings.momentum, settings.weight_decay, settings.clip, work.visit.inputs.kind


def _like(work: Work, settings: Train) -> Hashable:
    """Return what clients have in common that take the same memory, but for the number of their examples."""
    leaves, spec = tree_flatten(work.prepared)
    kinds = tuple((x.shape[1:], x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    return _fixed(work, settings), str(spec), kinds


class _Stage:
    """Stacks of K clients in fixed places, and the recorded step that works on them."""

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        works: Sequence[Work],
        stacked: StackedPrepared,
        settings: Train,
        *,
        augmented: bool,
        room: int,
        record: Record | None,
    ) -> None:
        self.uses = 0
        self._net, self._size, self._room = net, settings.batch, room
        like, k = works[0].visit, len(works)
        held, one = like.inputs.held, like.inputs[:1]
        self._x, self._y = like.inputs.like(held.new_zeros(k, room, *held.shape[1:])), like.y.new_zeros(k, room)
        #: Augmentation draws on the host, so augmented inputs come from outside.
        self._inputs = one.new_zeros(k, self._size, *one.shape[1:]) if augmented else None
        self._orders = like.y.new_zeros(rows_of_plan(room, settings.batch, settings.epochs), k, self._size)
        self._counts = like.y.new_zeros(self._orders.shape[:2])
        self._number = like.y.new_zeros(())
        self._first = torch.arange(k, device=net.device)[:, None] * room
        self._places = torch.arange(self._size, device=net.device)
        self._state = StackedState.of(works)
        fixed = [x.to(net.device).clone() if isinstance(x, Tensor) else x for x in stacked.leaves]
        self._prepared = StackedPrepared(fixed, stacked.dims, stacked.spec)
        self._stepper = StackedStepper(
            net, objective, settings, like.params, works[0].prepared, stacked, padded=True, recorded=True
        )
        #: Without momentum nothing else shows a wrong gradient that is lost beside the weights.
        self._slopes = None if settings.momentum else torch.zeros_like(self._state.flat)
        changing = [*self._state.tensors(), self._number, *([] if self._slopes is None else [self._slopes])]
        outside = Outside(objective, net.module, fixed)
        self.replay = Replay(self._step, changing, record, fewer=True, outside=outside)

    def fits(self, visits: Sequence[Visit], stacked: StackedPrepared, epochs: int) -> bool:
        """Return whether there is room for the clients' examples, their steps, and what was prepared for them."""
        largest = max(len(visit.y) for visit in visits)
        pairs = [(old, new) for old, new in zip(self._prepared.leaves, stacked.leaves) if isinstance(new, Tensor)]
        return (
            largest <= self._room
            and steps(largest, self._size, epochs) <= len(self._orders)
            and all(new.dim() < 2 or new.shape[1] <= old.shape[1] for old, new in pairs)
        )

    def train(
        self, works: Sequence[Work], stacked: StackedPrepared, settings: Train, augment: Augment | None
    ) -> list[Trained]:
        """Train the models of `works`; the results are copies."""
        visits = [work.visit for work in works]
        counts = self._fill(works, stacked, settings)
        generators = [augmentation_stream(visit) for visit in visits]
        for t, own in enumerate(counts.tolist()):
            if augment is not None and self._inputs is not None:
                for i, count in enumerate(own):
                    if count:
                        rows = self._orders[t, i, :count]
                        own_x = self._x.ready(self._x.held[i][rows])
                        self._inputs[i, :count] = augment(self._net.arrange(own_x), generators[i])
            self.replay()
        state = self._state
        copied = StackedState(
            state.flat.clone(),
            state.momentum.clone(),
            state.total.clone(),
            state.lr,
            {name: buffer.clone() for name, buffer in state.buffers.items()},
        )
        steps = (counts > 0).sum(0).tolist()
        return [copied.trained(i, visit, steps[i], settings.epochs) for i, visit in enumerate(visits)]

    @torch.no_grad()
    def _fill(self, works: Sequence[Work], stacked: StackedPrepared, settings: Train) -> Tensor:
        """Copy the clients' values to their places; return the number of examples in each step (steps, K)."""
        visits = [work.visit for work in works]
        rows, counts = plan(visits, settings)
        for place, values in ((self._orders, rows), (self._counts, counts)):
            pinned = values.pin_memory() if self._net.device.type == "cuda" else values
            place[: len(values)].copy_(pinned, non_blocking=True)
        for i, visit in enumerate(visits):
            self._x.held[i, : len(visit.y)].copy_(visit.inputs.held)
            self._y[i, : len(visit.y)].copy_(visit.y)
        fresh = StackedState.of(works)
        for place, value in zip([*self._state.tensors(), self._state.lr], [*fresh.tensors(), fresh.lr], strict=True):
            place.copy_(value)
        for place, leaf in zip(self._prepared.leaves, stacked.leaves):
            if isinstance(leaf, Tensor):
                _copy(leaf, place)
        self._number.zero_()
        return counts

    def _step(self) -> None:
        """Take the step that the number says."""
        state, k = self._state, len(self._state.flat)
        counts = self._counts.index_select(0, self._number.view(1)).view(k)
        rows = self._orders.index_select(0, self._number.view(1)).view(k, self._size)
        mask = (self._places < counts.clamp(min=1)[:, None]).to(state.flat.dtype)  # not empty: 0 / 0 is no number
        at = (rows + self._first).view(-1)
        y = self._y.view(-1).index_select(0, at).view(k, self._size)
        x = self._inputs
        if x is None:
            found = self._x.ready(self._x.held.flatten(0, 1).index_select(0, at))
            x = found.view(k, self._size, *found.shape[1:])
        step = Step(self._number, x, y, mask, rows)
        self._stepper.advance(state, self._prepared, step, trains=counts > 0, seen_slopes=self._slopes)
        self._number.add_(1)


def _copy(leaf: Tensor, place: Tensor) -> None:
    """Copy `leaf` (K, ...) into `place`, which may be longer in its second axis and is 0 there."""
    if leaf.dim() < 2 or leaf.shape[1] == place.shape[1]:
        place.copy_(leaf)
    else:
        place.zero_()
        place[:, : leaf.shape[1]].copy_(leaf)
