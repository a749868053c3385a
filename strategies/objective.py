"""The client's part of a method: the loss that a client minimises, as a pure function.

It uses the model only through :class:`Net`, so it runs in the sequential trainer and in the batched one (``vmap``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.width import Width

P = TypeVar("P", bound=Settings, default=Any)
Tensors = dict[str, Tensor]
Prepared = dict[str, Any]


class Net(Protocol):
    """A model as functions of its parameters and buffers.

    ``logits`` returns class scores, (batch, classes); ``features`` embeddings, (batch, embedding); ``classify`` class
    scores of embeddings `z`; ``call`` the output of submodule `part` (dotted name, empty for the whole model).
    ``corners`` are the narrower models in this one that training needs, the widest first; each is given this one's
    tensors. `train` switches batch normalisation and dropout to training mode, where buffers are updated in place.
    """

    # fmt: off
    @property
    def corners(self) -> Sequence[Net]: ...
    def logits(self, params: Tensors, buffers: Tensors, x: Tensor, train: bool = True) -> Tensor: ...
    def features(self, params: Tensors, buffers: Tensors, x: Tensor, train: bool = True) -> Tensor: ...
    def classify(self, params: Tensors, buffers: Tensors, z: Tensor, train: bool = True) -> Tensor: ...
    def call(self, part: str, params: Tensors, buffers: Tensors, *inputs: Tensor, train: bool = True) -> Tensor: ...
    # fmt: on


class Batch(NamedTuple):
    """One mini-batch: inputs `x` (augmented if the task is configured so) and labels `y`.

    `mask` is, in the batched trainer, 1 for real rows and 0 for padding, float (batch,); `rows` are the examples' row
    numbers in ``visit.inputs``, int64 (batch,). `step` is the number of the step within the visit, from 0: the counter
    of a loss's random draws (:mod:`tasks.models.counted_random`), an int64 tensor () where steps are compiled.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    rows: Tensor | None = None
    step: int | Tensor = 0

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of per-example `values`, shape (batch,), over the real rows."""
        return values.mean() if self.mask is None else (values * self.mask).sum() / self.mask.sum()


@dataclass
class Visit:
    """One training of one model at one client: everything that the client has for it."""

    net: Net
    params: Tensors  # with the buffers the model that training starts from, as Objective.start returned it (copies)
    buffers: Tensors
    extras: Mapping[str, Arrays]  # groups of arrays, and scalars, that the server sent beside the model
    config: Mapping[str, Any]
    state: Arrays  # what this client stored at its last accepted visit; empty at its first visit
    inputs: Inputs  # one row per example; inputs[rows] returns prepared ones, (rows, ...)
    y: Tensor  # labels, int64 (n,)
    client: int  # partition id
    round: int  # from 1
    rounds: int
    seed: int
    classes: int
    lr: float  # this round's learning rate
    momentum: Tensor | None = None  # initial momentum buffer, flat (p,), None for zero; Objective.prepare may set it
    augmented: bool = False  # whether batches are augmented; values computed from inputs in advance are then invalid
    exchange: int = 0  # from 0

    @property
    def x(self) -> Tensor:
        """All prepared inputs, (n, ...). On a GPU, where pictures lie as bytes, each reading prepares them anew."""
        return self.inputs[:]


@dataclass
class Trained:
    """The result of training: parameters (flat and by name), buffers, momentum buffer, number of steps, mean loss."""

    params: Tensors
    buffers: Tensors
    flat: Tensor
    momentum: Tensor | None
    steps: int
    loss: float


@dataclass
class Outcome:
    """Extra arrays that the client sends beside its model, state that it stores, and extra metrics."""

    extras: dict[str, Arrays] = field(default_factory=dict)
    state: Arrays | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Objective(Generic[P]):
    """Cross-entropy; the base of every other objective. `params` are the method's settings."""

    #: Whether the batched trainer may run it under vmap; whether ``finish`` returns a state that the client stores for
    #: its next visit; whether it needs a model with ``features`` and ``classifier``.
    batchable: bool = True
    keeps: bool = False
    halves: bool = False
    #: Names of prepared tensors with one entry per example, which `loss` reads at ``batch.rows`` alone.
    by_row: frozenset[str] = frozenset()
    #: Names of what the server must send beside the model (extras and scalars), and of the extras sent back. An
    #: objective can serve any method that sends and expects just these (``objective=NAME``).
    needs: frozenset[str] = frozenset()
    sends: frozenset[str] = frozenset()
    #: Whether a visit draws a share (the server's ``pooled-share``) of all clients' data, in simulations only; whether
    #: the formulas of client or server assume that clients train with SGD.
    pooled: bool = False
    assumes_sgd: bool = False

    # Functions that an objective defines if it needs them:
    start: Callable[[Arrays, Arrays], Arrays] | None = None
    """``(received, state)``: return the model that training starts from, given the server's and ``visit.state``."""
    prepare: Callable[[Visit], Prepared] | None = None
    """``(visit)``: compute, once before training, the tensors that the other functions need."""
    gradient: Callable[[Tensor, Prepared], Tensor | None] | None = None
    """``(flat, prepared)``: return a term to add to the flat gradient (p,) at parameters `flat` (p,), or None.

    It comes before weight decay and momentum, and is for terms whose gradient is known in closed form (a proximal term,
    a control variate).
    """
    ascent: Callable[[Tensor, Tensor, Prepared], Tensor | None] | None = None
    """``(flat, gradient, prepared)``: return the way (p,) to the point whose gradient is taken in this step, or None.

    For sharpness-aware methods: `gradient` is that of the loss at `flat`, both (p,). The trainer takes the gradient of
    the same batch at ``flat + way``, with the same dropout, for the step from `flat`. Batch-normalisation statistics
    and the reported loss are those of the first pass.
    """
    rate: Callable[[int, int | Tensor], float | Tensor] | None = None
    """``(number, steps)``: return the factor of the learning rate in step `number`, from 0, of the `steps` of a visit.

    In the batched trainer `steps` has one entry per client, (k, 1).
    """
    finish: Callable[[Visit, Trained, Prepared], Outcome] | None = None
    """``(visit, trained, prepared)``: return what the client sends beside the model and, with :attr:`keeps`, stores."""

    def __init__(self, params: P) -> None:
        self.params = params

    def corners(self, size: Width) -> Sequence[Width]:
        """Return the narrower sizes that training needs in a model of `size` (``net.corners``)."""
        return []

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch."""
        scores = net.logits(params, buffers, batch.x)
        return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))

    def predict(self, net: Net, params: Tensors, buffers: Tensors, x: Tensor, prepared: Prepared) -> Tensor:
        """Return the trained model's class scores of `x` in evaluation mode, shape (batch, classes)."""
        return net.logits(params, buffers, x, train=False)


def flatten(params: Tensors) -> Tensor:
    """Return all `params` in order as one flat tensor (p,)."""
    return torch.cat([p.reshape(-1) for p in params.values()])


def unflatten(flat: Tensor, like: Tensors) -> Tensors:
    """Return the pieces of `flat` (p,) in the names and shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {name: piece.reshape(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces)}


def as_tensors(arrays: Arrays, like: Tensor | None = None) -> Tensors:
    """Return `arrays` as tensors with memory of their own, on the device of `like`."""
    device = like.device if like is not None else None
    return {name: torch.from_numpy(np.array(a, copy=True)).to(device) for name, a in arrays.items()}


def as_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return numpy arrays of `tensors` (detached, on the CPU)."""
    return {name: t.detach().cpu().numpy() for name, t in tensors.items()}
