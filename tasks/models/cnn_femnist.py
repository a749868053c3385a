"""FedCross's "CNN" for FEMNIST."""

from __future__ import annotations

from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, block, convolutional, images
from fedcross.tasks.models.pooling import MaxPool2


class Params(Settings):
    """The network has no settings."""


def build(params: Params, task: Task) -> Split:  # noqa: ARG001
    """Return conv5 16, pool2, conv5 32, pool2, 256, classes.

    Weights for 1x28x28 and 62 classes: conv 25*16+16 = 416, 16*32*25+32 = 12,832; fully connected 512*256+256 =
    131,328, 256*62+62 = 15,934; together 160,510. The authors' code declares a dropout that it never calls: left out.
    """
    channels, _, _ = images(task, "cnn_femnist")
    extractor = nn.Sequential(
        *block(channels, 16, 5, 0, MaxPool2()),
        *block(16, 32, 5, 0, MaxPool2()),
    )
    return convolutional(extractor, (256,), task, "cnn_femnist")
