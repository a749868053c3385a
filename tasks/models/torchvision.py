"""Any classification network of torchvision, by its name, with random weights."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._fitting import check_fit
from fedcross.tasks.models._split import Split, images
from fedcross.tasks.models.dropout import count_dropout


class Params(Settings):
    """A name of ``torchvision.models``, and further arguments of that network's builder (``image_size: 32``)."""

    architecture: str = "mobilenet_v3_small"
    options: dict[str, int | float | bool | str] = Field(default_factory=dict)


class Repeat(nn.Module):
    """Grey images to three equal channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, 3, height, width)`` of ``(batch, 1, height, width)``."""
        return x.expand(-1, 3, -1, -1)


def halve(network: nn.Module, classes: int, name: str) -> Split:
    """Return `network` as features and classifier: its last linear layer leaves it and becomes the classifier.

    Dropout and stochastic depth are replaced by counter-based ones. Another last layer is a ConfigError.
    """
    count_dropout(network)
    leaves = [
        (path, layer) for path, layer in network.named_modules() if next(layer.parameters(False), None) is not None
    ]
    path, last = leaves[-1] if leaves else ("", network)
    if not isinstance(last, nn.Linear) or last.out_features != classes:
        found = f"its last layer is {type(last).__name__}, not a linear layer with {classes} outputs"
        raise ConfigError(f"model.architecture={name!r}: {found}. Choose another network.")
    parent, _, child = path.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity())
    return Split(network, last)


def build(params: Params, task: Task) -> Split:
    """Return torchvision's network with its own initial weights; nothing is downloaded."""
    from torchvision import models

    channels, _, _ = images(task, "torchvision")
    name = params.architecture
    known = models.list_models(module=models)
    if name not in known:
        raise ConfigError(f"model.architecture={name!r}: torchvision has no such network. {nearest(name, known)}")
    if channels not in (1, 3):
        found = f"takes images of 1 or 3 channels, but task {task.name!r} has {channels}"
        raise ConfigError(f"model.architecture={name!r}: {found}. Choose one of our own models.")
    try:
        network = models.get_model(name, weights=None, num_classes=task.classes, **params.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.options={params.options!r}: {error}. Remove what {name} does not take.") from error
    split = halve(network, task.classes, name)
    if channels == 1:
        split.features = nn.Sequential(Repeat(), split.features)
    check_fit(split, task, f"model.architecture={name!r}, model.options")
    return split
