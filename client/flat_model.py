"""Wraps a torch module in the functions that an objective uses, with all parameters in one flat vector.

Parameters are views into ``flat`` and their gradients views into ``gradient``, so the optimiser is three operations
on one vector, and loading or reading the model is one copy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcross.client.device import bfloat16
from fedcross.strategies.objective import Tensors
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.models.dropout import dropout_names
from fedcross.tasks.models.part import BUFFERS, base_tensors, hold_statistics
from fedcross.tasks.models.weights import check_weights, tied

if TYPE_CHECKING:
    from fedcross.client.corner import Corner


class Parts:
    """The functions of a :class:`strategies.objective.Net` whose `call` computes any submodule."""

    def logits(self, params: Tensors, buffers: Tensors, x: Tensor, train: bool = True) -> Tensor:
        """Return class scores, shape (batch, classes)."""
        return self.call("", params, buffers, x, train=train)

    def features(self, params: Tensors, buffers: Tensors, x: Tensor, train: bool = True) -> Tensor:
        """Return embeddings, shape (batch, embedding)."""
        return self.call("features", params, buffers, x, train=train)

    def classify(self, params: Tensors, buffers: Tensors, z: Tensor, train: bool = True) -> Tensor:
        """Return class scores of embeddings `z`, shape (batch, classes)."""
        return self.call("classifier", params, buffers, z, train=train)

    def call(self, part: str, params: Tensors, buffers: Tensors, *inputs: Tensor, train: bool = True) -> Tensor:
        """Return the output of submodule `part` (dotted name, empty for the whole model) for `inputs`."""
        raise NotImplementedError


class ModuleNet(Parts):
    """A module as a :class:`strategies.objective.Net`.

    Parameters
    ----------
    module : nn.Module
        Must have the parts ``features`` and ``classifier`` if the objective uses them.
    device : torch.device
        Device for the training.
    precision : {"float32", "tf32", "bfloat16"}
        Precision of the arithmetic inside the network (:mod:`client.device`; TF32 is a setting of the process).
        Weights, gradients, the optimiser and the loss function stay float32.

    Attributes
    ----------
    names : list of str
        Names in the state_dict; for tied weights, only the first name.
    params, buffers : Tensors
        The live parameters (leaves that require gradients) and persistent buffers, in state_dict order of each kind.
        Frozen parameters (``requires_grad=False``) are among the buffers: received, used and sent, never changed.
    frozen : frozenset of str
        Names of the frozen parameters.
    dropout : list of str
        Names of the buffers that hold the random states of the dropout layers; empty without dropout.
    base_buffers : Tensors
        Buffers of a base outside the model (``train.only``), as every visit starts with them.
    flat, gradient : Tensor, shape (p,)
        All parameters and all gradients.
    scores : callable
        Class scores of inputs under the live model, in training mode.

    Raises
    ------
    ConfigError
        If the weights cannot be trained (:func:`tasks.models.weights.check_weights`).
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: str = "float32") -> None:
        check_weights(module)
        self.module = module.to(device).train()
        _keep_in_place(self.module)
        hold_statistics(self.module)
        self._still = copy.deepcopy(self.module, {id(p): p for p in base_tensors(self.module)}).eval()
        written = {id(buffer) for buffer in base_tensors(self.module, BUFFERS)}
        self.base_buffers = {n: b.clone() for n, b in self.module.named_buffers() if id(b) in written}
        self.device = device
        self._narrow = precision == "bfloat16"
        self._channels_last = channels_last(module, device, precision)
        self._again = tied(self.module)
        self._rows: dict[tuple[torch.dtype, int], Tensor] = {}
        #: What was found out of padded batches (:mod:`client.batched.padding`), each with its objective.
        self.padding: dict[Hashable, tuple[object, str]] = {}
        self.names = [name for name in module.state_dict() if name not in self._again]
        #: The narrower models in this one that are trained too (:mod:`client.corner`); the cache sets them.
        self.corners: Sequence[Corner] = ()
        self.dropout = dropout_names(self.module)
        self.params: Tensors = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        still = {n: p for n, p in self.module.named_parameters() if not p.requires_grad}
        self.frozen = frozenset(still)
        self.buffers: Tensors = {n: b for n, b in self.module.named_buffers() if n in set(self.names)} | still
        self._pieces, total = [], 0
        for p in self.params.values():
            self._pieces.append((p.shape, torch.empty(p.shape, device="meta").stride(), total))
            total += p.numel()
        like = next(iter(self.params.values()))
        self.flat = torch.empty(total, dtype=like.dtype, device=device)
        self.gradient = torch.zeros_like(self.flat)
        for name, piece, slope in zip(self.params, self.split(self.flat), self.split(self.gradient)):
            parameter = self.params[name]
            with torch.no_grad():
                piece.copy_(parameter)
            parameter.data = piece
            parameter.grad = slope
        self._live: Arrays = {}
        if device.type == "cpu":
            self._live = {name: piece.numpy() for name, piece in zip(self.params, self.split(self.flat))}
        self._places = [
            (n, p, p.data_ptr(), s.data_ptr()) for (n, p), s in zip(self.params.items(), self.split(self.gradient))
        ]
        live = partial(self.logits, self.params, self.buffers)
        self.scores: Callable[[Tensor], Tensor] = live if self._narrow else self.module

    @property
    def kept(self) -> list[Tensor]:
        """What a forward pass may change beside the trained parameters: all buffers, and all frozen parameters."""
        frozen = (p.detach() for name, p in self.module.named_parameters() if name not in self.params)
        return [*self.module.buffers(), *frozen]

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Compute in float32 inside the block, whatever the precision of the training is."""
        narrow, self._narrow = self._narrow, False
        products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            self._narrow = narrow
            if self.device.type == "cuda":
                torch.backends.cuda.matmul.allow_tf32 = products
                torch.backends.cudnn.allow_tf32 = convolutions

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat` (p,) in the shapes of the parameters."""
        return [flat.as_strided(shape, stride, start) for shape, stride, start in self._pieces]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy `arrays` (every name of the state_dict) into the live model."""
        self.check_views()
        with torch.no_grad():
            if self.device.type == "cpu":
                buffers = {name: buffer.detach().numpy() for name, buffer in self.buffers.items()}
                for name, target in {**self._live, **buffers}.items():
                    target[...] = arrays[name]  # torch cannot read a read-only view, numpy can
            else:
                self._upload(arrays)
            for name, value in self.base_buffers.items():
                self.module.get_buffer(name).copy_(value)

    def begin(self, arrays: Mapping[str, np.ndarray]) -> tuple[Tensors, Tensors]:
        """Load the model that a visit starts from, and return copies of its parameters and buffers, by name."""
        self.load(arrays)
        return dict(zip(self.params, self.split(self.flat.clone()))), {n: b.clone() for n, b in self.buffers.items()}

    def _upload(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy `arrays` to the device in one piece for all parameters, and one for the buffers of each type.

        The host waits until each piece is there, so that the next model can take its place in the pinned memory.
        """
        self.flat.copy_(self._pinned(arrays, self.params))
        for same in _by_type(self.buffers).values():
            row = self._pinned(arrays, same).to(self.device)
            for target, piece in zip(same.values(), torch.split(row, [target.numel() for target in same.values()])):
                target.copy_(piece.view(target.shape))

    def _pinned(self, arrays: Mapping[str, np.ndarray], like: Tensors) -> Tensor:
        """Return the `arrays` of the names in `like`, of one type, as one row in memory that a GPU reads fast."""
        kind, total = next(iter(like.values())).dtype, sum(tensor.numel() for tensor in like.values())
        key = kind, total
        if key not in self._rows:
            row = torch.empty(total, dtype=kind)
            self._rows[key] = row.pin_memory() if self.device.type == "cuda" else row
        host, start = self._rows[key].numpy(), 0
        for name, tensor in like.items():
            host[start : start + tensor.numel()] = arrays[name].reshape(-1)
            start += tensor.numel()
        return self._rows[key]

    def check_views(self) -> None:
        """Raise a RuntimeError if a parameter or gradient is no view of its row: the optimiser would not reach it."""
        for name, parameter, place, slope in self._places:
            if parameter.data_ptr() != place:
                raise RuntimeError(
                    f"{name} lies outside the flat row. A layer of this model moves its weights in memory."
                )
            if parameter.grad is None or parameter.grad.data_ptr() != slope:
                raise RuntimeError(
                    f"The gradient of {name} lies outside the flat row, so the optimiser does not see it. "
                    "Do not call zero_grad() or set .grad in a loss or a model."
                )

    def read(self) -> Arrays:
        """Return the live model in state_dict order; on the CPU as views, valid until the next visit."""
        return self.arrays(self.params, self.buffers)

    def arrays(self, params: Tensors, buffers: Tensors) -> Arrays:
        """Return a model with these values in state_dict order; on the CPU as views.

        Raises
        ------
        RuntimeError
            If they are the live ones, and a parameter or gradient had left its row, so that training did not reach it.
        """
        if params is self.params:
            self.check_views()
        if self.device.type == "cpu":
            own = self._live if params is self.params else {n: p.detach().numpy() for n, p in params.items()}
            own = {**own, **{name: buffer.detach().numpy() for name, buffer in buffers.items()}}
            return {name: own[name] for name in self.names}
        values = {**params, **buffers}
        found: Arrays = {}
        for same in _by_type({name: values[name].detach() for name in self.names}).values():
            row, start = torch.cat([tensor.reshape(-1) for tensor in same.values()]).cpu().numpy(), 0
            for name, tensor in same.items():
                found[name] = row[start : start + tensor.numel()].reshape(tuple(tensor.shape))
                start += tensor.numel()
        return {name: found[name] for name in self.names}

    def arrange(self, x: Tensor) -> Tensor:
        """Return inputs in the network's fastest memory layout: channels last for images of a convolutional network.

        On a GPU that holds in TF32 and bfloat16; in float32 it is channels first. Weights keep their layout:
        views of one vector in the order of ``parameters()``, on which all methods rely.
        """
        return x.contiguous(memory_format=torch.channels_last) if self._channels_last and x.dim() == 4 else x

    def call(self, part: str, params: Tensors, buffers: Tensors, *inputs: Tensor, train: bool = True) -> Tensor:
        """Return the output of submodule `part` (dotted name, empty for the whole model) for `inputs`."""
        if not self._narrow:
            return self._run(part, params, buffers, inputs, train)
        with bfloat16(self.device, self.module):
            return self._run(part, params, buffers, inputs, train).float()

    def _run(self, part: str, params: Tensors, buffers: Tensors, inputs: tuple[Tensor, ...], train: bool) -> Tensor:
        if train and params is self.params and buffers is self.buffers:
            module = self.module.get_submodule(part)
            return module(*inputs)  # type: ignore[no-any-return]
        module = (self.module if train else self._still).get_submodule(part)
        prefix = f"{part}." if part else ""
        given = {**params, **buffers}
        given |= {name: given[first] for name, first in self._again.items() if first in given}
        values = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        return functional_call(module, values, inputs)  # type: ignore[no-any-return]


def channels_last(module: nn.Module, device: torch.device, precision: str) -> bool:
    """Return whether images for `module` lie with channels last: where that is safe, and not slower.

    cuDNN's convolutions in float32 are faster with channels first (docs/performance.md, GPU). With AVX2 alone,
    torch 2.15 writes beyond its memory in the way back of a strided 1x1 convolution with fewer than eight channels.
    """
    if device.type == "cuda" and precision == "float32":
        return False
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return bool(layers) and not any(
        set(layer.kernel_size) == {1} and set(layer.stride) != {1} and layer.in_channels // layer.groups < 8
        for layer in layers
    )


def _by_type(tensors: Tensors) -> dict[torch.dtype, Tensors]:
    """Return `tensors` grouped by their dtype, in order."""
    groups: dict[torch.dtype, Tensors] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.dtype, {})[name] = tensor
    return groups


def _keep_in_place(module: nn.Module) -> None:
    """Stop the recurrent layers of `module` from moving their weights, which cuDNN does at the next copy or call.

    cuDNN then compacts the weights in each call, and torch warns of that once.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = lambda: None  # type: ignore[method-assign]
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
