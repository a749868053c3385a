"""A narrower model inside a wide one: from the wide one's tensors it computes what a slice of that size computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcross.client.flat_model import ModuleNet, Parts
from fedcross.strategies.objective import Tensors

#: What selects a corner's part of an axis: how many of the first positions, the positions, or None for all.
Part = int | Tensor | None


class Corner(Parts):
    """A :class:`strategies.objective.Net` that is given the parameters and buffers of a wide model.

    Gradients reach the weights of the corner alone. Statistics of batch normalisation are those of the wide model's own
    width: a corner changes a copy. States of dropout layers are the wide model's, and move on.

    Parameters
    ----------
    net : ModuleNet
        The slice as a network of its own; its weights are not used.
    wide : ModuleNet
        The wide network.
    places : mapping of str to sequence of int arrays
        For each entry of which the slice has less than the wide network: its positions along every axis, ascending
        (:meth:`tasks.models.width.Corners.positions`).
    """

    corners = ()

    def __init__(self, net: ModuleNet, wide: ModuleNet, places: Mapping[str, Sequence[NDArray[np.intp]]]) -> None:
        self._net, self._wide = net, wide
        shapes = {name: tensor.shape for name, tensor in {**wide.params, **wide.buffers}.items()}
        self._parts: dict[str, list[Part]] = {
            name: [_part(where, count, wide.device) for where, count in zip(axes, shapes[name], strict=True)]
            for name, axes in places.items()
        }

    @property
    def module(self) -> nn.Module:
        """The slice's module."""
        return self._net.module

    def call(self, part: str, params: Tensors, buffers: Tensors, *inputs: Tensor, train: bool = True) -> Tensor:
        """Return the output of the slice's submodule `part` for `inputs`, with weights of the wide model."""
        module = self._wide.module
        states = {name: buffers[name] if name in buffers else module.get_buffer(name) for name in self._net.dropout}
        own = {name: self._of(name, params[name]) for name in self._net.params}
        kept = {name: self._of(name, buffers[name]).clone() for name in self._net.buffers}
        return self._net.call(part, own, kept | states, *inputs, train=train)

    def _of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the corner's part of an entry of the wide model."""
        if name not in self._parts:
            return tensor
        for axis, part in enumerate(self._parts[name]):
            if isinstance(part, Tensor):
                tensor = tensor.index_select(axis, part)
            elif part is not None:
                tensor = tensor.narrow(axis, 0, part)
        return tensor.contiguous()


def _part(where: NDArray[np.intp], count: int, device: torch.device) -> Part:
    """Return what selects the positions `where` along an axis of `count`."""
    if len(where) == count:
        return None
    return len(where) if where[-1] == len(where) - 1 else torch.from_numpy(where).to(device)
