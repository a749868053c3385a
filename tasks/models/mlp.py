"""Multi-layer perceptron for small images (digits)."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Annotated

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split
from fedcross.tasks.models.width import Hidden


class Params(Settings):
    """Settings of the perceptron.

    Attributes
    ----------
    hidden : tuple of int
        Widths of the hidden layers, at least one.
    """

    hidden: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (64,)


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return flatten, (linear, ReLU) for each hidden layer, classifier.

    On digits (64 inputs, 10 classes) with 64 hidden units: 64*64+64 + 64*10+10 = 4,810 weights.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    inputs = math.prod(task.shape)
    for i, size in enumerate(params.hidden, start=1):
        outputs = width(size)
        parts[f"fc{i}"] = nn.Linear(inputs, outputs)
        parts[f"relu{i}"] = nn.ReLU()
        inputs = outputs
    return Split(nn.Sequential(parts), nn.Linear(inputs, task.classes))
