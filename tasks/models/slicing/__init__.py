"""Slices of a network by width: the first channels of every hidden dimension, as a smaller network of the same kind.

:func:`plan_of` finds which axis of which weight belongs to which group of channels; :func:`cut` builds the small
network. Both sides of a federation do this from the same network, so only arrays travel.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.tasks.base import Task
from fedcross.tasks.models._fitting import trial_inputs
from fedcross.tasks.models.slicing.labels import called, refusal
from fedcross.tasks.models.slicing.plan import FULL as FULL
from fedcross.tasks.models.slicing.plan import Group as Group
from fedcross.tasks.models.slicing.plan import Plan as Plan
from fedcross.tasks.models.slicing.plan import Size as Size
from fedcross.tasks.models.slicing.trace import trace
from fedcross.tasks.models.weights import tied

#: Largest difference of scores between a slice and the full network with the cut channels set to zero.
AGREEMENT = 1e-4


def plan_of(network: nn.Module, task: Task) -> Plan:
    """Return how `network` is sliced, from one forward pass of a trial batch, on the CPU.

    Raises
    ------
    ConfigError
        If it cannot be sliced; the message names the layer and the reason.
    """
    if any(parameter.device.type != "cpu" for parameter in network.parameters()):
        network = copy.deepcopy(network).cpu()
    return trace(network, random_inputs(task))


def random_inputs(task: Task) -> Tensor:
    """Return a trial batch: token ids, or numbers from a normal distribution, the same at every call."""
    inputs = trial_inputs(task)
    if task.vocabulary:
        return inputs
    return torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))


def cut(network: nn.Module, plan: Plan, size: Size, task: Task | None = None, scaler: float = 1.0) -> nn.Module:
    """Return the slice of `network`, with the corner of its weights and memory of its own.

    Parameters
    ----------
    network : Module
        The full network, which stays as it is; with width 1 it is returned itself.
    plan : Plan
        From :func:`plan_of`.
    size : Size
        What to keep.
    task : Task, optional
        If given, the slice is tried on a batch and, where ``plan.exact``, compared with the full network whose cut
        channels are set to zero.
    scaler : float
        What hidden layers divide their output by (HeteroFL).

    Raises
    ------
    ConfigError
        If the slice does not run, or computes something else.
    """
    if not any(plan.cuts(name, size) for name in plan.entries):
        return network
    small = copy.deepcopy(network, _corners(network, plan, size))
    for layer in small.modules():
        _tell_sizes(layer)
    for name, (before, after) in plan.resized.items():
        padding: Any = small.get_submodule(name)
        padding.resize(plan.count(before, size, padding.channels_in), plan.count(after, size, padding.channels_out))
    if isinstance(getattr(small, "embedding", None), int):
        for layer in getattr(small, "classifier", nn.Identity()).modules():
            if isinstance(layer, nn.Linear):
                small.embedding = layer.in_features  # type: ignore[assignment]
                break
    if task is not None:
        _check(network, small, plan, size, task)
    for name in plan.scaled if scaler != 1 else ():
        small.get_submodule(name).register_forward_hook(Scaler(scaler))
    return small


class Scaler:
    """Divides what a layer returns (HeteroFL's scaler), in training and when the slice is used alone."""

    def __init__(self, divisor: float) -> None:
        self.divisor = divisor

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Return the scaled output."""
        return output / self.divisor


def _corners(network: nn.Module, plan: Plan, size: Size) -> dict[int, Tensor]:
    """Return the corner of every weight that `size` cuts, by the weight's identity; a copy that is made with it as its
    memo has the corners in place of the weights, and never the weights themselves. Tied weights stay one.
    """
    first_of = tied(network)
    corners: dict[int, Tensor] = {}
    for name in network.state_dict():
        first = first_of.get(name, name)
        if not plan.cuts(first, size):
            continue
        owner, _, entry = name.rpartition(".")
        whole = getattr(network.get_submodule(owner), entry)
        if id(whole) not in corners:
            index = tuple(torch.from_numpy(axis).to(whole.device) for axis in plan.index(first, size))
            part = whole.detach()[index].clone()
            corners[id(whole)] = nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
    return corners


def _tell_sizes(layer: nn.Module) -> None:
    """Make the numbers that `layer` keeps about its weights agree with them."""
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        layer.in_channels, layer.out_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, nn.modules.conv._ConvNd):
        if layer.groups > 1 and layer.groups == layer.in_channels:
            layer.groups = weight.shape[0]
        layer.in_channels, layer.out_channels = weight.shape[1] * layer.groups, weight.shape[0]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        known = weight if weight is not None else layer.running_mean
        layer.num_features = layer.num_features if known is None else len(known)
    elif isinstance(layer, nn.GroupNorm) and weight is not None:
        layer.num_groups, layer.num_channels = layer.num_groups * len(weight) // layer.num_channels, len(weight)
    elif isinstance(layer, nn.LayerNorm) and weight is not None:
        layer.normalized_shape = tuple(weight.shape)
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = weight.shape[1]
    elif isinstance(layer, nn.RNNBase):
        states, inputs = (getattr(layer, name) for name in ("weight_hh_l0", "weight_ih_l0"))
        layer.hidden_size, layer.input_size = states.shape[1], inputs.shape[1]
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = weight.numel()


def _check(network: nn.Module, small: nn.Module, plan: Plan, size: Size, task: Task) -> None:
    """Raise a ConfigError unless the slice runs and agrees with the full network with the cut channels set to zero."""
    inputs, name = random_inputs(task), called(network)
    try:
        found = _scores(small, inputs)
    except Exception as error:  # a user's forward can raise anything
        raise refusal(
            name, "", f"width {size.text}", f"the slice raised {type(error).__name__}: {error}; forward must take "
            "numbers of channels from its tensors (x.flatten(1), not x.view(-1, 400))",
        ) from error  # fmt: skip
    if not plan.exact:
        return
    full = copy.deepcopy(network)
    masks = plan.masks({n: t.detach().cpu().numpy() for n, t in full.state_dict().items() if n in plan.entries}, size)
    with torch.no_grad():
        for entry, tensor in full.state_dict().items():
            if entry in masks:
                tensor.mul_(torch.from_numpy(masks[entry]).to(tensor.device))
    expected = _scores(full, inputs)
    if expected.shape != found.shape or not torch.allclose(expected, found, AGREEMENT, AGREEMENT):
        why = "a layer treats channels in a way that was not followed"
        if size.start and plan.resized:
            why = (
                "a layer adds channels to those of a group that stays whole; to cut every group, set method.whole=0, "
                "with AdaptiveFL method.starts=[0]"
            )
        raise refusal(
            name, "", f"width {size.text}", "the slice computes something else than the full network with the cut "
            f"channels set to zero; {why}",
        )  # fmt: skip


def _scores(network: nn.Module, inputs: Tensor) -> Tensor:
    was_training = network.training
    try:
        with torch.no_grad():
            device = next(network.parameters()).device
            found: Tensor = network.eval()(inputs.to(device))
            return found.cpu()
    finally:
        network.train(was_training)


__all__ = ["FULL", "ConfigError", "Group", "Plan", "Size", "cut", "plan_of"]
