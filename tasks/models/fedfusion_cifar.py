"""FedFusion's CNN for CIFAR-10 (Yao et al., ICIP 2019)."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, block, convolutional, images, xavier


class Params(Settings):
    """Settings of FedFusion's CNN.

    Attributes
    ----------
    dropout : float
        Probability after each hidden layer; .2 in the authors' code, unstated in the paper.
    """

    dropout: float = Field(default=0.2, ge=0, lt=1)


def build(params: Params, task: Task) -> Split:
    """Return conv5 64, pool3/2, conv5 64, pool3/2, 384, 192, classes; Xavier weights and zero biases, as the code.

    Weights for 3x32x32 and 10 classes: conv 3*64*25+64 = 4,864, 64*64*25+64 = 102,464; fully connected 4,096*384+384 =
    1,573,248, 384*192+192 = 73,920, 192*10+10 = 1,930; together 1,756,426.
    """
    channels, _, _ = images(task, "fedfusion_cifar")
    extractor = nn.Sequential(
        *block(channels, 64, 5, 2, nn.MaxPool2d(3, stride=2, padding=1)),
        *block(64, 64, 5, 2, nn.MaxPool2d(3, stride=2, padding=1)),
    )
    return xavier(convolutional(extractor, (384, 192), task, "fedfusion_cifar", dropout=params.dropout))
