"""Follows the channels of a network through one forward pass of a trial batch.

The pass runs with real tensors, so any Python code in ``forward`` is followed, branches and loops too, which a symbolic
trace is not. Each call of torch goes through a ``TorchFunctionMode``, which looks up its rule
(:mod:`tasks.models.slicing.rules`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedcross.tasks.models.pooling import Convolution, MaxPool2
from fedcross.tasks.models.slicing.labels import Groups, Label, UnsliceableError, called, refusal
from fedcross.tasks.models.slicing.plan import Axis, Group, Plan, Segment
from fedcross.tasks.models.slicing.rules import (
    RULES,
    Call,
    convolution,
    embedding,
    linear,
    recurrent,
    transposed_convolution,
)
from fedcross.tasks.models.weights import tied

#: Layers whose output is linear in their own weight and bias, so that dividing it is dividing these -> the axis of the
#: weight that has their outputs.
OUTPUTS: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Convolution), 0),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1),
}


@runtime_checkable
class Resizable(Protocol):
    """A layer without weights that changes the number of channels, axis 1, and can be told new numbers."""

    channels_out: int

    def resize(self, channels_in: int, channels_out: int) -> None:
        """Work on the first `channels_in` channels and return the first `channels_out` from now on."""


class Tracer(TorchFunctionMode):
    """Labels the tensors of a forward pass.

    Parameters
    ----------
    network : Module
        Its parameters and buffers are labelled by their names.

    Attributes
    ----------
    groups : Groups
        The groups found so far.
    exact : bool
        Whether no layer normalises over channels.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.model = called(network)
        self.groups = Groups()
        self.exact = True
        self.stack: list[str] = []
        self.resized: dict[str, tuple[Axis, Axis]] = {}
        self._labels: dict[int, tuple[Tensor, Label]] = {}  # with the tensor, so that no other gets its id
        self._weights: dict[int, str] = {id(t): n for n, t in [*network.named_buffers(), *network.named_parameters()]}
        self._axes: dict[str, list[Axis]] = {}
        self._named: dict[str, set[int]] = {}
        shared = {name.rpartition(".")[0] for pair in tied(network).items() for name in pair}
        #: Layers that HeteroFL's scaler may divide, nothing but a product and a sum -> the weight's axis of outputs.
        #: Layers whose weight another one has, or uses, are none.
        self._divisible = {
            name: OUTPUTS[type(layer)]
            for name, layer in network.named_modules()
            if type(layer) in OUTPUTS and name not in shared
        }
        self._hidden: dict[str, None] = {}  # convolutions and linear layers, in the order of their calls
        self._batch_norm = False
        self._paused = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and label what it returns."""
        named = kwargs or {}
        result = func(*args, **named)
        if self._paused or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result
        inputs = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        for owner in {self._weights[id(leaf)].rpartition(".")[0] for leaf in inputs if id(leaf) in self._weights}:
            if not self.stack or self.stack[-1] != owner:
                self._divisible.pop(owner, None)
        name = getattr(func, "__name__", str(func))
        rule = RULES.get(name)
        makes = name in MAKERS
        if not makes and not any(any(self.label(x)) for x in inputs):
            return result
        try:
            if rule is None:
                raise UnsliceableError("no rule says what it does to channels")
            label = rule(self, Call(args, named, result))
        except UnsliceableError as error:
            raise refusal(self.model, self.stack[-1] if self.stack else "", name, str(error)) from error
        self._set(result, label)
        return result

    def _set(self, result: Any, label: Label | list[Label]) -> None:
        """Label what an operation returned; a list has one label for each tensor in it."""
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        labels = label if isinstance(label, list) else [label] * len(tensors)
        for tensor, one in zip(tensors, labels):
            self._labels[id(tensor)] = tensor, one

    def label(self, tensor: Tensor) -> Label:
        """Return the channels along each axis of `tensor`."""
        if id(tensor) in self._labels:
            return self._labels[id(tensor)][1]
        if self.is_weight(tensor):
            return tuple(self.known(tensor))
        return (None,) * tensor.dim()

    def is_weight(self, tensor: Any) -> bool:
        """Return whether `tensor` is a parameter or a buffer of the network."""
        return id(tensor) in self._weights

    def known(self, weight: Tensor) -> list[Axis]:
        """Return the axes of a weight as far as they are known."""
        name = self._weights.get(id(weight))
        if name is None:
            return [None] * weight.dim()
        return self._axes.setdefault(name, [None] * weight.dim())

    def name_axis(self, weight: Tensor, place: int, axis: Axis) -> None:
        """Say which channels lie along an axis of a weight; a second use of the weight joins both."""
        if not self.is_weight(weight):
            if axis is not None:
                raise UnsliceableError("its weights are no parameters of the network")
            return
        name, axes = self._weights[id(weight)], self.known(weight)
        seen = self._named.setdefault(name, set())
        axes[place] = self.groups.join(axes[place], axis) if place in seen else axis
        if place in seen and (axis is None or axes[place] is None):
            self.groups.keep_whole(axes[place])
        seen.add(place)

    def outputs(self, weight: Tensor, place: int, bias: Tensor | None) -> Axis:
        """Return the group of a weight's outputs, a new one at its first use; its bias has the same."""
        if not self.is_weight(weight):
            return None
        seen = place in self._named.get(self._weights[id(weight)], set())
        axis = self.known(weight)[place] if seen else self.groups.new(weight.shape[place])
        self.name_axis(weight, place, axis)
        if bias is not None:
            self.name_axis(bias, 0, axis)
        return axis

    def always(self, count: int) -> tuple[Segment, ...]:
        """Return segments of positions that are always kept."""
        return (Segment(-1, count),)

    def produced(self) -> None:
        """Note that the current layer, a convolution or a linear one, makes channels."""
        if self.stack:
            self._hidden[self.stack[-1]] = None

    def batch_normalised(self) -> None:
        """Note that the network has a batch norm: the scale of what it gets changes nothing."""
        self._batch_norm = True

    @contextmanager
    def following(self, network: nn.Module) -> Iterator[None]:
        """Know the current layer of `network` while it runs."""

        def enter(name: str, layer: nn.Module) -> Any:
            def hook(*_: Any) -> None:
                self.stack.append(name)
                self._paused += isinstance(layer, Resizable)

            return hook

        def leave(name: str, layer: nn.Module) -> Any:
            def hook(_: Any, inputs: tuple[Tensor, ...], result: Tensor) -> None:
                self.stack.pop()
                if isinstance(layer, Resizable):
                    self._paused -= 1
                    self._resize(name, layer, inputs[0], result)

            return hook

        hooks = [m.register_forward_pre_hook(enter(n, m)) for n, m in network.named_modules()]
        hooks += [m.register_forward_hook(leave(n, m)) for n, m in network.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _resize(self, name: str, layer: Resizable, x: Tensor, result: Tensor) -> None:
        arriving = self.label(x)
        out = self.groups.new(layer.channels_out) if arriving[1] else None
        self.resized[name] = arriving[1], out
        self._labels[id(result)] = result, (arriving[0], out, *arriving[2:])

    def plan(self, network: nn.Module, output: Tensor) -> Plan:
        """Return the plan of `network`, whose forward pass ended in `output`."""
        for axis in self.label(output):
            self.groups.keep_whole(axis)
        cut = self.groups.cut()
        number = {root: i for i, root in enumerate(cut)}

        def final(axis: Axis) -> Axis:
            if axis is None or not any(s.group >= 0 and self.groups.root(s.group) in number for s in axis):
                return None
            return tuple(self._final(segment, number) for segment in axis)

        entries, shapes = {}, {}
        again = tied(network)
        for name, tensor in network.state_dict().items():
            axes = tuple(map(final, self._axes.get(name, [None] * tensor.dim())))
            if any(axes) and name not in again:
                entries[name], shapes[name] = axes, tuple(tensor.shape)
        resized = {name: (final(a), final(b)) for name, (a, b) in self.resized.items()}
        divisible = {
            name
            for name, axis in self._divisible.items()
            if (weight := f"{name}.weight") in entries and entries[weight][axis] is not None
        }
        scaled = tuple(name for name in self._hidden if name in divisible and not self._batch_norm)
        return Plan(tuple(Group(*cut[root]) for root in cut), entries, shapes, self.exact, resized, scaled)

    def _final(self, segment: Segment, number: Mapping[int, int]) -> Segment:
        """Return a segment with the group's number in the plan, or always kept if the group is not cut."""
        if segment.group < 0:
            return segment
        root = self.groups.root(segment.group)
        if root in number:
            return Segment(number[root], segment.inner)
        return Segment(-1, segment.inner * self.groups.sizes[root])


#: Operations that make channels where none arrive.
MAKERS = frozenset(
    name for name, rule in RULES.items() if rule in (linear, convolution, transposed_convolution, embedding, recurrent)
)


def trace(network: nn.Module, inputs: Tensor) -> Plan:
    """Return the plan of `network` from one forward pass of `inputs` in evaluation mode; `network` is not changed.

    Raises
    ------
    ConfigError
        If channels cannot be followed; the message names the layer, the operation and the reason.
    """
    twin = copy.deepcopy(network).eval()
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, MaxPool2):  # its compiled loop is no operation of torch's
            twin.set_submodule(name, nn.MaxPool2d(2))
    tracer = Tracer(twin)
    with torch.no_grad(), tracer.following(twin), tracer:
        output = twin(inputs)
    found = tracer.plan(twin, output)
    if not found.groups:
        raise refusal(called(network), *_nothing_found(network))
    return found


def _nothing_found(network: nn.Module) -> tuple[str, str, str]:
    """Return the layer, the operation and the reason why `network` has no channels to slice."""
    for name, layer in network.named_modules():
        if is_parametrized(layer):
            why = "its weights are computed from other weights, as weight norm does, and these cannot be followed"
            return name, "parametrization", why
    return "", "forward", "it has no hidden channels"
