"""LeNet-5 as FedCross's "CNN" for CIFAR: two convolutions, three fully connected layers, ReLU and max-pool."""

from __future__ import annotations

from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, block, convolutional, images
from fedcross.tasks.models.pooling import MaxPool2


class Params(Settings):
    """LeNet-5 has no settings."""


def build(params: Params, task: Task) -> Split:  # noqa: ARG001
    """Return conv5 6, pool2, conv5 16, pool2, 120, 84, classes.

    28x28 images are padded to LeNet's 32x32 inside the first convolution, as LeCun et al. (1998) did.

    Weights for 3x32x32 and 10 classes: conv 3*6*25+6 = 456, 6*16*25+16 = 2,416; fully connected 400*120+120 = 48,120,
    120*84+84 = 10,164, 84*10+10 = 850; together 62,006. For 1x28x28: 62,006 - 2*6*25 = 61,706.
    """
    channels, height, width = images(task, "lenet5")
    padding = 2 if (height, width) == (28, 28) else 0
    extractor = nn.Sequential(
        *block(channels, 6, 5, padding, MaxPool2()),
        *block(6, 16, 5, 0, MaxPool2()),
    )
    return convolutional(extractor, (120, 84), task, "lenet5")
