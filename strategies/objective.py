"""The client's part of a method: the loss that a client minimises, as a pure function.

An objective uses the model only through :class:`Net`, with explicit parameters and buffers. The same code therefore
runs in the sequential trainer and in the batched one (``torch.func.vmap`` over clients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.arrays import Arrays
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.width import Width

#: Type of a method's settings; ``Any`` in code for all methods.
P = TypeVar("P", bound=Settings, default=Any)
Tensors = dict[str, Tensor]
Prepared = dict[str, Any]


class Net(Protocol):
    """A model as functions of its parameters and buffers.

    `train` switches batch normalisation and dropout between training mode and evaluation mode. In training mode the
    given buffers are updated in place.
    """

    @property
    def corners(self) -> Sequence[Net]:
        """The narrower models in this one that training needs (:meth:`Objective.corners`), the widest first; each is
        given the tensors of this one.
        """
        ...

    def logits(self, params: Tensors, buffers: Tensors, x: Tensor, train: bool = True) -> Tensor:
        """Return class scores, shape (batch, classes)."""
        ...

    def features(self, params: Tensors, buffers: Tensors, x: Tensor, train: bool = True) -> Tensor:
        """Return embeddings, shape (batch, embedding)."""
        ...

    def classify(self, params: Tensors, buffers: Tensors, z: Tensor, train: bool = True) -> Tensor:
        """Return class scores of embeddings `z`, shape (batch, classes)."""
        ...

    def call(self, part: str, params: Tensors, buffers: Tensors, *inputs: Tensor, train: bool = True) -> Tensor:
        """Return the output of submodule `part` (dotted name, empty for the whole model) for `inputs`."""
        ...


class Batch(NamedTuple):
    """One mini-batch.

    Attributes
    ----------
    x, y : Tensor
        Inputs, augmented if the task is configured so, and labels.
    mask : Tensor or None
        In the batched trainer 1 for real rows and 0 for padding, float (batch,).
    rows : Tensor or None
        Row numbers of these examples in ``visit.inputs``, int64 (batch,); None where the caller has no visit.
    step : int or Tensor of int64, shape ()
        Number of the step within the visit, from 0. A loss uses it as the counter of its counter-based random draws
        (:mod:`strategies.parts.loss_random`). A tensor where steps are compiled, which would
        compile a Python number in.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    rows: Tensor | None = None
    step: int | Tensor = 0

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of per-example `values`, shape (batch,), over the real rows."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum()


@dataclass
class Visit:
    """Everything that a client has during one visit: one training of one model at one client.

    Attributes
    ----------
    net : Net
        The model's functions.
    params, buffers : Tensors
        The model that training starts from, as :meth:`Objective.start` returned it (copies that training does not
        change).
    extras : mapping of str to Arrays
        Groups of arrays that the server sent beside the model.
    config : mapping
        Scalars that the server sent.
    state : Arrays
        State that this client stored at its last accepted visit; empty at its first visit.
    inputs : Inputs
        The client's inputs, one row per example; ``inputs[rows]`` returns prepared ones, shape (rows, ...).
    y : Tensor
        Labels, int64 (n,).
    client, round, rounds, seed, classes : int
        Partition id, round number from 1, planned rounds, the run's seed, number of labels.
    lr : float
        This round's learning rate.
    momentum : Tensor or None
        Initial momentum buffer, flat (p,); None starts from zero. ``Objective.prepare`` may set it.
    augmented : bool
        Whether the trainer augments the inputs of every batch; values computed from `inputs` in advance are then
        invalid.
    exchange : int
        The exchange within the round, from 0.
    """

    net: Net
    params: Tensors
    buffers: Tensors
    extras: Mapping[str, Arrays]
    config: Mapping[str, Any]
    state: Arrays
    inputs: Inputs
    y: Tensor
    client: int
    round: int
    rounds: int
    seed: int
    classes: int
    lr: float
    momentum: Tensor | None = None
    augmented: bool = False
    exchange: int = 0

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
    """Cross-entropy; the base of every other objective.

    Parameters
    ----------
    params : Settings
        The method's settings.
    """

    #: Whether the batched trainer may run this objective under vmap.
    batchable: bool = True
    #: Names of prepared tensors with one entry per example, which `loss` reads at ``batch.rows`` alone: a stack pads
    #: them to the largest client's length.
    by_row: frozenset[str] = frozenset()
    #: Whether ``finish`` returns a state that the client stores for its next visit.
    keeps: bool = False
    #: Whether it needs a model with ``features`` and ``classifier``, not only one that maps inputs to scores.
    halves: bool = False
    #: Names of what the server must send beside the model (extras and scalars), and of the extras sent back. An
    #: objective can serve any method that sends and expects just these (``objective=NAME``).
    needs: frozenset[str] = frozenset()
    sends: frozenset[str] = frozenset()
    #: Whether a visit draws its examples from all clients' data together; the server's ``pooled-share`` says how large
    #: a share. Only for an upper bound: it needs a process that holds all data, which only a simulation has.
    pooled: bool = False
    #: Whether the formulas of client or server assume that clients train with SGD.
    assumes_sgd: bool = False

    def __init__(self, params: P) -> None:
        self.params = params

    def corners(self, size: Width) -> Sequence[Width]:
        """Return the narrower sizes that training needs in a model of `size` (``net.corners``)."""
        return []

    def start(self, received: Arrays, state: Arrays) -> Arrays:
        """Return the model that training starts from; ``visit.params`` and ``visit.buffers`` will hold it.

        Parameters
        ----------
        received : Arrays
            The model that the server sent.
        state : Arrays
            State that this client stored at its last accepted visit; empty at its first visit.
        """
        return received

    def prepare(self, visit: Visit) -> Prepared:
        """Compute, once before training, the tensors that `loss` and `gradient` need."""
        return {}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch."""
        scores = net.logits(params, buffers, batch.x)
        return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return a term to add to the flat gradient (p,), or None for no term.

        For terms whose gradient is known in closed form (a proximal term, a control variate). `flat` holds the current
        parameters, shape (p,). The trainer adds the term before weight decay and momentum.
        """
        return None

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return the way (p,) to the point whose gradient replaces `gradient` in this step, or None to keep `gradient`.

        For sharpness-aware methods: `gradient` is the gradient of the loss at `flat`, both (p,). The trainer computes
        the loss of the same batch at ``flat + way``, with the same dropout, and takes that gradient for the step from
        `flat`. Batch-normalisation statistics and the reported loss are those of the first pass.
        """
        return None

    def predict(self, net: Net, params: Tensors, buffers: Tensors, x: Tensor, prepared: Prepared) -> Tensor:
        """Return the trained model's class scores of `x` in evaluation mode, shape (batch, classes)."""
        return net.logits(params, buffers, x, train=False)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Return what the client sends beside the model and, if :attr:`keeps` is set, the state that it stores."""
        return Outcome()


def flatten(params: Tensors) -> Tensor:
    """Return all `params` in order as one flat tensor (p,)."""
    return torch.cat([p.reshape(-1) for p in params.values()])


def unflatten(flat: Tensor, like: Tensors) -> Tensors:
    """Return the pieces of `flat` (p,) in the names and shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {name: piece.reshape(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces)}


def as_tensors(arrays: Arrays, like: Tensor | None = None) -> Tensors:
    """Return `arrays` as tensors with memory of their own, on the device of `like`."""
    import numpy as np

    device = like.device if like is not None else None
    return {name: torch.from_numpy(np.array(a, copy=True)).to(device) for name, a in arrays.items()}


def as_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return numpy arrays of `tensors` (detached, on the CPU)."""
    return {name: t.detach().cpu().numpy() for name, t in tensors.items()}
