"""The sequential trainer on a GPU: one step recorded as a CUDA graph, replayed for every client and every round.

A recorded step works on tensors that stay in their place. Parameters, gradients and buffers do so in any case
(:mod:`client.flat_model`); a stage holds the rest: the client's data, the order of its examples, momentum, learning
rate, the step's number, and what the objective prepared. A visit copies its values in; after that the host only
repeats the graph, which looks up its own batch. Short batches are called with the same code. Where a step cannot be
recorded, the reason is logged and the plain loop of :mod:`client.trainer` goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from fedcross.client.cuda_graphs import Record, Replay
from fedcross.client.device import breaks_device
from fedcross.client.flat_model import ModuleNet
from fedcross.client.graph_memory import give_back
from fedcross.client.outside import Outside
from fedcross.client.recordings import Key, Recorder, is_by_row, kinds_of, rows_of_plan, steps
from fedcross.client.trainer import Augment, Stepper, augmentation_stream, host_orders, train
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Batch, Objective, Prepared, Trained, Visit


class Captured(Recorder["_Stage"]):
    """Trains clients as :func:`client.trainer.train` does, with recorded steps where that is possible."""

    def train(self, visit: Visit, prepared: Prepared, settings: Train, augment: Augment | None = None) -> Trained:
        """Train the model loaded in the net; parameters and result as for :func:`client.trainer.train`."""
        stage, start = None, list[Tensor]()
        if len(visit.y) >= settings.batch:  # without a full batch there is nothing to repeat
            try:
                start = [tensor.clone() for tensor in self._changing()]
                stage = self._stage(visit, prepared, settings, augmented=augment is not None)
            except torch.OutOfMemoryError:
                self._recordings.refuse("the device's memory is too small for a copy of the clients' data")
        if stage is None:
            return train(self._net, self._objective, visit, prepared, settings, augment)
        back = None
        try:
            back = stage.replay.keep()
            trained = stage.train(visit, prepared, settings.epochs, augment)
        except Exception as error:  # whatever a method raises: the plain loop shows whether it does there too
            if breaks_device(error):
                raise
            self._recordings.give_up(stage, error)
        else:
            self._recordings.look_at(stage)
            if not stage.replay.differs:
                return trained
        if back is not None:
            back()
        del stage  # with its copy of the data; outside of the handler, whose error keeps the tensors of the step
        give_back(self._net.device)
        with torch.no_grad():
            for tensor, old in zip(self._changing(), start, strict=True):
                tensor.copy_(old)
        return train(self._net, self._objective, visit, prepared, settings, augment)

    def _changing(self) -> list[Tensor]:
        """Return what a visit changes in the net."""
        return [self._net.flat, *self._net.kept]

    def _stage(self, visit: Visit, prepared: Prepared, settings: Train, *, augmented: bool) -> _Stage | None:
        """Return the stage for this visit; None if the plain loop should train it."""
        if not self._records(prepared):
            return None

        def key() -> Key:
            return (_kind(visit, prepared, settings, self._objective.by_row), augmented), 1

        def make() -> _Stage:
            room = max(self._examples, len(visit.y))
            return _Stage(
                self._net,
                self._objective,
                visit,
                prepared,
                settings,
                augmented=augmented,
                room=room,
                record=self._record,
            )

        return self._recordings.take(key, prepared, lambda stage: stage.fits(visit, settings.epochs), make)


class _Stage:
    """Tensors in fixed places for visits of one kind, and the recorded step that works on them."""

    def __init__(
        self,
        net: ModuleNet,
        objective: Objective,
        visit: Visit,
        prepared: Prepared,
        settings: Train,
        *,
        augmented: bool,
        room: int,
        record: Record | None,
    ) -> None:
        self._net, self._size, self._room = net, settings.batch, room
        self.uses = 0
        self._x, self._y = visit.inputs.like(_space(visit.inputs.held, room)), _space(visit.y, room)
        #: Augmentation draws on the host, so augmented inputs come from outside.
        self._inputs = _space(net.arrange(visit.inputs[:1]), self._size) if augmented else None
        self._orders = visit.y.new_zeros(rows_of_plan(room, self._size, settings.epochs), self._size)
        self._number = visit.y.new_zeros(())
        self._momentum, self._lr, self._total = (
            torch.zeros_like(net.flat),
            net.flat.new_zeros(()),
            net.flat.new_zeros(()),
        )
        leaves, spec = tree_flatten_with_path(prepared)
        self._leaves = [
            _fixed(leaf, net.device, room if is_by_row(path, objective.by_row) else None) for path, leaf in leaves
        ]
        own: Prepared = tree_unflatten(self._leaves, spec)
        self._stepper = Stepper(net, objective, own, settings, self._momentum, self._total, self._lr)
        state = [net.flat, self._momentum, self._total, self._number, *net.kept]
        if not settings.momentum:  # else the momentum shows a wrong gradient that is lost beside the weights
            state.append(net.gradient)
        outside = Outside(objective, net.module, self._leaves)
        self.replay = Replay(lambda: self._step(self._size, self._inputs), state, record, outside=outside)

    def fits(self, visit: Visit, epochs: int) -> bool:
        """Return whether there is room for the visit's examples and steps."""
        return len(visit.y) <= self._room and steps(len(visit.y), self._size, epochs) <= len(self._orders)

    def train(self, visit: Visit, prepared: Prepared, epochs: int, augment: Augment | None) -> Trained:
        """Train the model loaded in the net."""
        counts = self._fill(visit, prepared, epochs)
        generator = augmentation_stream(visit) if augment is not None else None
        for t, count in enumerate(counts):
            inputs = None
            if augment is not None and generator is not None:
                inputs = self._net.arrange(augment(self._x[self._orders[t, :count]], generator))
            if count < self._size:
                self._step(count, inputs)
            else:
                if inputs is not None and self._inputs is not None:
                    self._inputs.copy_(inputs)
                self.replay()
        mean = float(self._total) / max(sum(counts), 1)
        return Trained(self._net.params, self._net.buffers, self._net.flat, self._momentum, len(counts), mean)

    def _step(self, count: int, inputs: Tensor | None) -> None:
        """Take the step that the number says, of `count` examples; `inputs` takes the place of the looked-up ones."""
        rows = self._orders.index_select(0, self._number.view(1)).view(-1)[:count]
        x = self._x[rows] if inputs is None else inputs
        self._stepper.advance(Batch(x, self._y[rows], rows=rows, step=self._number))
        self._number.add_(1)

    @torch.no_grad()
    def _fill(self, visit: Visit, prepared: Prepared, epochs: int) -> list[int]:
        """Copy the visit's values to their places; return the number of examples in each step."""
        pieces = [piece for order in host_orders(visit, epochs) for piece in torch.split(order, self._size)]
        orders = torch.zeros(len(pieces), self._size, dtype=torch.int64)
        for row, piece in zip(orders, pieces):
            row[: len(piece)] = piece
        if self._net.device.type == "cuda":
            orders = orders.pin_memory()
        self._orders[: len(pieces)].copy_(orders, non_blocking=True)
        self._x.held[: len(visit.y)].copy_(visit.inputs.held)
        self._y[: len(visit.y)].copy_(visit.y)
        for place, leaf in zip(self._leaves, tree_flatten(prepared)[0]):
            if isinstance(leaf, Tensor):
                (place[: len(leaf)] if leaf.dim() else place).copy_(leaf)
        if visit.momentum is None:
            self._momentum.zero_()
        else:
            self._momentum.copy_(visit.momentum)
        self._lr.fill_(visit.lr)
        self._total.zero_()
        self._number.zero_()
        return [len(piece) for piece in pieces]


def _kind(visit: Visit, prepared: Prepared, settings: Train, by_row: frozenset[str]) -> Any:
    """Return what visits must have in common to use one recording: what a step's Python code can see.

    The prepared tensors that `by_row` names may have any number of rows.
    """
    fixed = settings.batch, settings.momentum, settings.weight_decay, settings.clip
    return fixed, visit.inputs.kind, kinds_of(prepared, by_row)


def _fixed(leaf: Any, device: torch.device, room: int | None) -> Any:
    """Return a place for the values of `leaf`, with `room` rows unless None; what is no tensor stays as it is.

    Also a number's tensor that an objective left on the CPU gets a place on the device: a graph would keep its value.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device).clone() if room is None else _space(leaf, room).to(device)


def _space(like: Tensor, rows: int) -> Tensor:
    """Return zeros of `rows` rows in the memory layout of `like`."""
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    made = like.new_zeros((rows, *like.shape[1:]))
    return made.contiguous(memory_format=torch.channels_last) if last else made
