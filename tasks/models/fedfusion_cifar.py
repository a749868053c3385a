"""FedFusion's CNN for CIFAR-10 (Yao et al., ICIP 2019)."""

from __future__ import annotations

from functools import partial

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, cnn, xavier
from fedcross.tasks.models.width import Hidden


class Params(Settings):
    """Settings of FedFusion's CNN.

    Attributes
    ----------
    dropout : float
        Probability after each hidden layer; .2 in the authors' code, unstated in the paper.
    """

    dropout: float = Field(default=0.2, ge=0, lt=1)


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return conv5 64, pool3/2, conv5 64, pool3/2, 384, 192, classes; Xavier weights and zero biases, as the code.

    Weights for 3x32x32 and 10 classes: conv 3*64*25+64 = 4,864, 64*64*25+64 = 102,464; fully connected 4,096*384+384 =
    1,573,248, 384*192+192 = 73,920, 192*10+10 = 1,930; together 1,756,426.
    """
    pool = partial(nn.MaxPool2d, 3, stride=2, padding=1)
    return xavier(cnn(task, "fedfusion_cifar", width, (64, 64), (384, 192), (5, 5), True, params.dropout, pool))
