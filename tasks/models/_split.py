"""The structure of all models: features, then a linear classifier."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models.dropout import Dropout
from fedcross.tasks.models.pooling import Convolution, MaxPool2
from fedcross.tasks.models.width import Hidden


class NoSettings(Settings):
    """The network has no settings."""


class Split(nn.Sequential):
    """``classifier(features(x))``: input to embedding ``(batch, embedding)``, then to logits ``(batch, classes)``.

    `extractor_channels` are those of ``features.extractor``'s 4-D output, where FedFusion fuses; else 0.
    """

    features: nn.Module
    classifier: nn.Linear

    def __init__(self, features: nn.Module, classifier: nn.Linear, extractor_channels: int = 0) -> None:
        super().__init__(OrderedDict(features=features, classifier=classifier))
        self.embedding: int = classifier.in_features
        self.extractor_channels = extractor_channels


def images(task: Task, model: str) -> tuple[int, int, int]:
    """Return (channels, height, width) of `task`'s inputs; ConfigError if they are not images."""
    if len(task.shape) != 3:
        found = f"task {task.name!r} has inputs of shape {task.shape}"
        raise ConfigError(f"model.name={model!r}: needs images, but {found}. Choose a model for text.")
    channels, height, width = task.shape
    return channels, height, width


def tokens(task: Task, model: str) -> int:
    """Return the vocabulary size of `task`; ConfigError if its inputs are not token ids."""
    if task.vocabulary < 1 or len(task.shape) != 1:
        found = f"task {task.name!r} has inputs of shape {task.shape} and a vocabulary of {task.vocabulary}"
        raise ConfigError(f"model.name={model!r}: needs text (token ids), but {found}. Choose a model for images.")
    return task.vocabulary


def output_shape(extractor: nn.Module, task: Task, model: str) -> tuple[int, ...]:
    """Return the shape of one output of `extractor` for `task`'s images; ConfigError if they are too small for it."""
    shape = images(task, model)
    was_training = extractor.training
    try:
        with torch.no_grad():
            return tuple(extractor.eval()(torch.zeros(1, *shape)).shape[1:])
    except RuntimeError as error:
        small = f"images of shape {task.shape} of task {task.name!r} are too small for its convolutions and pools"
        raise ConfigError(f"model.name={model!r}: {small} ({error}). Choose a smaller model.") from error
    finally:
        extractor.train(was_training)


def convolutional(
    extractor: nn.Module,
    hidden: Sequence[int],
    task: Task,
    model: str,
    body: nn.Module | None = None,
    dropout: float = 0.0,
) -> Split:
    """Return `extractor`, `body`, flatten, fully connected layers of `hidden` units with ReLU and dropout, classifier.

    `extractor` has the convolutions up to the second block's pool, `body` further ones; `model` is a name for messages.
    """
    channels = output_shape(extractor, task, model)[0]
    parts: OrderedDict[str, nn.Module] = OrderedDict(extractor=extractor)
    if body is not None:
        parts["body"] = body
    width = math.prod(output_shape(nn.Sequential(*parts.values()), task, model))
    parts["flatten"] = nn.Flatten()
    for i, size in enumerate(hidden, start=1):
        parts[f"fc{i}"] = nn.Linear(width, size)
        parts[f"relu{i}"] = nn.ReLU()
        if dropout:
            parts[f"dropout{i}"] = Dropout(dropout)
        width = size
    return Split(nn.Sequential(parts), nn.Linear(width, task.classes), extractor_channels=channels)


def cnn(
    task: Task,
    model: str,
    width: Hidden,
    filters: tuple[int, int],
    hidden: Sequence[int],
    kernels: tuple[int, int] = (5, 5),
    padding: bool | int = 0,
    dropout: float = 0.0,
    pool: Callable[[], nn.Module] = MaxPool2,
) -> Split:
    """Return two blocks of convolution, pool and ReLU, then fully connected layers of `hidden` units, and classes.

    `padding` is that of the first convolution; True keeps the pictures' size in both. The ReLU after the pool gives the
    same values as before it, on a quarter of them.
    """
    layers: list[nn.Module] = []
    channels, _, _ = images(task, model)
    for full, kernel in zip(filters, kernels):
        outputs = width(full)
        border = kernel // 2 if padding is True else padding if not layers else 0
        layers += [Convolution(channels, outputs, kernel, border), pool(), nn.ReLU()]
        channels = outputs
    return convolutional(nn.Sequential(*layers), [width(size) for size in hidden], task, model, dropout=dropout)


def xavier(model: Split) -> Split:
    """Give every convolution and linear layer Xavier uniform weights and zero biases, in place; return `model`."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
