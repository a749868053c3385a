"""Widths: a network is built with fewer hidden channels; each array is the leading corner of the full network's.

A network of width p keeps the first ``ceil(p n)`` of the n channels of each hidden dimension (HeteroFL); inputs and
classes stay. Of a recurrent layer's gates, which torch stacks in one array, it keeps the first rows of each gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.tasks.models.weights import tied

Array = NDArray[Any]
Arrays = dict[str, Array]
Shapes = Mapping[str, tuple[int, ...]]
#: Widths that differ by less are the same.
TOLERANCE = 1e-9
#: Gates that a recurrent layer stacks along the first axis of its arrays.
GATES = {"LSTM": 4, "GRU": 3}


class Width(NamedTuple):
    """The width of a model: it keeps the share `ratio` in (0, 1] of the channels of each hidden dimension.

    The first `whole` dimensions, in the order of the forward pass, stay whole (AdaptiveFL).
    """

    ratio: float = 1.0
    whole: int = 0

    @property
    def text(self) -> str:
        """The width in reports and metrics: ``0.4``, or ``0.4@2`` if the first dimensions stay whole."""
        return f"{self.ratio:g}" + (f"@{self.whole}" if self.whole and self.ratio < 1 else "")


FULL = Width()


class Hidden(float):
    """What a network is built with: the ratio of its width, and a count of its hidden dimensions.

    ``width(64)`` is the number of channels that a hidden dimension of 64 has; a network calls it once for each, in the
    order of the forward pass. As a number it is the ratio, for networks that compute their channels themselves.
    """

    def __new__(cls, width: Width = FULL) -> Hidden:
        """Begin with no dimension."""
        new = super().__new__(cls, width.ratio)
        new._whole, new.channels = width.whole, []
        return new

    _whole: int
    #: Channels of the full network's hidden dimensions so far.
    channels: list[int]

    def __call__(self, channels: int) -> int:
        """Return how many of the next hidden dimension's `channels` the network has."""
        self.channels.append(channels)
        return channels if len(self.channels) <= self._whole else kept(channels, float(self))


def kept(channels: int, ratio: float) -> int:
    """Return ``ceil(ratio * channels)``, not misled by rounding."""
    return math.ceil(round(ratio * channels, 9))


def positions(shape: tuple[int, ...], narrow: tuple[int, ...], gates: int = 1) -> list[NDArray[np.intp]]:
    """Return where an array of shape `narrow` lies in one of `shape`: positions along each axis, ascending."""
    found = [np.arange(count) for count in narrow]
    if gates > 1:
        whole, part = shape[0] // gates, narrow[0] // gates
        found[0] = np.concatenate([gate * whole + np.arange(part) for gate in range(gates)])
    return found


class Corners:
    """The shapes of one network's arrays at every width, and the corner of a full model that each width has.

    `shapes` gives those of the ``state_dict`` at a width, `hidden` are the channels of the full network's hidden
    dimensions (empty if it does not count them), `gates` and `products` as :func:`gates_of` and :func:`products`.
    """

    def __init__(
        self,
        shapes: Callable[[Width], Shapes],
        hidden: tuple[int, ...],
        gates: Mapping[str, int] | None = None,
        products: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._made = shapes
        self.hidden = hidden
        self._gates, self._products = gates or {}, products
        self._shapes: dict[Width, Shapes] = {FULL: shapes(FULL)}
        self._indices: dict[tuple[str, Width], tuple[Array, ...]] = {}

    @classmethod
    def of(cls, build: Callable[[Width], nn.Module], hidden: tuple[int, ...]) -> Corners:
        """Return the shapes of the networks that `build` makes."""
        full = build(FULL)
        return cls(lambda width: shapes_of(build(width)), hidden, gates_of(full), products(full))

    def shapes(self, width: Width) -> Shapes:
        """Return the shapes of a model of `width`; a ConfigError if they are no corners of the full model's."""
        key = FULL if width.ratio >= 1 else width
        if key not in self._shapes:
            narrow, full = self._made(key), self._shapes[FULL]
            for name in full:
                small = narrow.get(name, ())
                if len(small) != len(full[name]) or any(a > b for a, b in zip(small, full[name])):
                    found = f"at width {width.text}, {name} has shape {small}, in the full network {full[name]}"
                    raise ConfigError(f"model: {found}. Build the same layers with fewer channels.")
            self._shapes[key] = narrow
        return self._shapes[key]

    def shape(self, name: str, width: Width) -> tuple[int, ...]:
        """Return the shape of the entry `name` in a model of `width`."""
        return self.shapes(width)[name]

    def cuts(self, name: str, width: Width) -> bool:
        """Return whether a model of `width` has less of the entry `name` than the full model."""
        return self.shape(name, width) != self._shapes[FULL][name]

    def positions(self, name: str, width: Width, within: Width = FULL) -> list[NDArray[np.intp]]:
        """Return where the entry `name` of a model of `width` lies in that of a wider one, along each axis."""
        return positions(self.shape(name, within), self.shape(name, width), self._gates.get(name, 1))

    def index(self, name: str, width: Width) -> tuple[Array, ...]:
        """Return what selects the part of the full entry `name` that a model of `width` has: ``array[index]``."""
        if (name, width) not in self._indices:
            self._indices[name, width] = np.ix_(*self.positions(name, width))
        return self._indices[name, width]

    def corner(self, arrays: Mapping[str, Array], width: Width) -> Arrays:
        """Return the part of a full model that one of `width` has; entries that it has whole are not copied."""
        return {n: np.array(a[self.index(n, width)]) if self.cuts(n, width) else a for n, a in arrays.items()}

    @cached_property
    def scaled(self) -> tuple[str, ...]:
        """The layers that HeteroFL's scaler divides: those whose outputs are hidden channels."""
        narrowest = Width(TOLERANCE)
        return tuple(
            name
            for name, axis in self._products
            if (entry := f"{name}.weight") in self._shapes[FULL]
            and self.shape(entry, narrowest)[axis] < self.shape(entry, FULL)[axis]
        )


def shapes_of(network: nn.Module) -> Shapes:
    """Return the shapes of `network`'s ``state_dict``, each tensor once."""
    again = tied(network)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items() if name not in again}


def gates_of(network: nn.Module) -> dict[str, int]:
    """Return the entries of recurrent layers -> the number of gates stacked along their first axis."""
    return {
        f"{name}.{entry}": GATES[layer.mode]
        for name, layer in network.named_modules()
        if isinstance(layer, nn.RNNBase) and layer.mode in GATES
        for entry, _ in layer.named_parameters(recurse=False)
    }


def products(network: nn.Module) -> list[tuple[str, int]]:
    """Return the convolutions and linear layers of `network` -> the axis of their weight's outputs.

    Layers that share a weight are left out. With a batch norm there are none: the scale of its input has no effect.
    """
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules()):
        return []
    shared = {name.rpartition(".")[0] for pair in tied(network).items() for name in pair}
    return [
        (name, int(isinstance(layer, nn.modules.conv._ConvTransposeNd)))
        for name, layer in network.named_modules()
        if name not in shared and isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    ]


def load_corner(narrow: nn.Module, full: nn.Module) -> None:
    """Overwrite the weights of `narrow` by the leading corner of those of `full`."""
    gates, arrays, again = gates_of(full), full.state_dict(), tied(narrow)
    with torch.no_grad():
        for name, tensor in narrow.state_dict().items():
            if name not in again:
                where = positions(tuple(arrays[name].shape), tuple(tensor.shape), gates.get(name, 1))
                tensor.copy_(arrays[name][tuple(map(torch.from_numpy, np.ix_(*where)))] if where else arrays[name])


def scale_outputs(network: nn.Module, layers: tuple[str, ...], divisor: float) -> None:
    """Divide what `layers` of `network` return by `divisor` (HeteroFL's scaler), in training and evaluation."""

    def divide(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG001
        return output / divisor

    for name in layers:
        network.get_submodule(name).register_forward_hook(divide)
