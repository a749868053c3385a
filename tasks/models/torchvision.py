"""Any classification network of torchvision, by its name, with random weights."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, images
from fedcross.tasks.models.dropout import Dropout


class Params(Settings):
    """Which network.

    Attributes
    ----------
    architecture : str
        A name of ``torchvision.models``, for example ``mobilenet_v3_small``.
    options : dict
        Further arguments of that network's builder, for example ``image_size: 32`` of a vision transformer.
    """

    architecture: str = "mobilenet_v3_small"
    options: dict[str, int | float | bool | str] = Field(default_factory=dict)


class Repeat(nn.Module):
    """Grey images to three equal channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, 3, height, width)`` of ``(batch, 1, height, width)``."""
        return x.expand(-1, 3, -1, -1)


def halve(network: nn.Module, classes: int, name: str) -> Split:
    """Return `network` as features and classifier: its last linear layer leaves it and becomes the classifier.

    Dropout and stochastic depth are replaced by counter-based ones of the same probability.

    Raises
    ------
    ConfigError
        If the last layer is not a linear layer with `classes` outputs.
    """
    from torchvision.ops import StochasticDepth

    for path, layer in list(network.named_modules()):
        if isinstance(layer, nn.Dropout) and layer.p < 1:
            _replace(network, path, Dropout(layer.p))
        elif isinstance(layer, StochasticDepth) and layer.p < 1:
            _replace(network, path, Dropout(layer.p, rows=True))
    leaves = [
        (path, layer) for path, layer in network.named_modules() if next(layer.parameters(False), None) is not None
    ]
    path, last = leaves[-1] if leaves else ("", network)
    if not isinstance(last, nn.Linear) or last.out_features != classes:
        raise ConfigError(
            f"model.architecture={name!r}: its last layer is {type(last).__name__}, not a linear layer with {classes} "
            f"outputs, so it has no features and classifier. Choose another network."
        )
    _replace(network, path, nn.Identity())
    return Split(network, last)


def _replace(network: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    setattr(network.get_submodule(parent), child, layer)


def build(params: Params, task: Task) -> Split:
    """Return torchvision's network with its own initial weights; nothing is downloaded.

    Raises
    ------
    ConfigError
        If torchvision has no such network, it cannot be split, or it does not take the task's images.
    """
    from torchvision import models

    channels, height, width = images(task, "torchvision")
    name = params.architecture
    known = models.list_models(module=models)
    if name not in known:
        raise ConfigError(f"model.architecture={name!r}: torchvision has no such network. {nearest(name, known)}")
    if channels not in (1, 3):
        raise ConfigError(
            f"model.architecture={name!r}: takes images of 1 or 3 channels, but task {task.name!r} has {channels}. "
            f"Choose one of our own models."
        )
    try:
        network = models.get_model(name, weights=None, num_classes=task.classes, **params.options)
    except TypeError as error:
        raise ConfigError(f"model.options={params.options!r}: {error}. Remove what {name} does not take.") from error
    split = halve(network, task.classes, name)
    if channels == 1:
        split.features = nn.Sequential(Repeat(), split.features)
    split.eval()
    try:
        with torch.no_grad():
            split(torch.zeros(2, channels, height, width))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.architecture={name!r}: does not take images of shape {task.shape} of task {task.name!r} ({error}). "
            f"Choose another network or set model.options."
        ) from error
    split.train()
    return split
