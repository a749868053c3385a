"""The networks of ``conf/model`` as their files have them, each with the shape of its task's examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import nn

from fedcross.conf.compose import CONF
from fedcross.conf.schema import settings_class
from fedcross.tasks.models import create

#: File in conf/model -> shape of an example; one number is a text's length. What is most in doubt on a GPU comes first:
#: after the smallest one cuDNN's LSTM in a graph.
SHAPES: dict[str, tuple[int, ...]] = {
    "lenet5": (3, 32, 32),
    "lstm": (80,),
    "resnet20": (3, 32, 32),
    "cnn_w": (3, 32, 32),
    "vgg16_bn": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "lstm_sent140": (25,),
    "vgg_femnist": (1, 28, 28),
    "cnn_femnist": (1, 28, 28),
    "own": (1, 8, 8),
    "torchvision": (3, 32, 32),
    "fedfusion_cifar": (3, 32, 32),
    "fedfusion_mnist": (1, 28, 28),
    "fedfusion_mnist_paper": (1, 28, 28),
    "resnet20_lab": (3, 32, 32),
    "mlp": (1, 8, 8),
}
CLASSES, WORDS = 10, 80


class Own(nn.Module):
    """A network of a user, with torch's own dropout and a normalisation of vectors."""

    embedding = 64

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2))
        self.classifier = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        scores: torch.Tensor = self.classifier(self.features(x))
        return scores


class Pictures(nn.Module):
    """A network of a user, with batch normalisation of pictures."""

    embedding = 8

    def __init__(self, classes: int) -> None:
        super().__init__()
        pooled = nn.AdaptiveAvgPool2d(1)
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), pooled, nn.Flatten())
        self.classifier = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        scores: torch.Tensor = self.classifier(self.features(x))
        return scores


def is_text(model: str) -> bool:
    """Return whether examples of `model` are words."""
    return len(SHAPES[model]) == 1


def build(model: str) -> nn.Module:
    """Return the network of the file `model` with its initial weights."""
    values = _values(model)
    module = values.pop("module", model)
    if model == "own":
        values["path"] = f"{__name__}:Own"
    words = WORDS if is_text(model) else None
    task: Any = SimpleNamespace(name="made up", shape=SHAPES[model], classes=CLASSES, vocabulary=words)
    return create(module, settings_class("model", module)(**values), task, 1)


def _values(model: str) -> dict[str, Any]:
    """Return the settings in the file of `model`, with those of the files that it takes over.

    What depends on the task is left out: the default suits these shapes.
    """
    found = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())
    values: dict[str, Any] = {}
    for parent in found.pop("defaults", []):
        values |= _values(parent) if parent != "_self_" else {}
    return values | {key: value for key, value in found.items() if key != "name" and "${" not in str(value)}
