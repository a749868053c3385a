"""LeNet-5 as FedCross's "CNN" for CIFAR: two convolutions, three fully connected layers, ReLU and max-pool."""

from __future__ import annotations

from fedcross.tasks.base import Task
from fedcross.tasks.models._split import NoSettings, Split, cnn, images
from fedcross.tasks.models.width import Hidden

Params = NoSettings


def build(params: NoSettings, task: Task, width: Hidden) -> Split:  # noqa: ARG001
    """Return conv5 6, pool2, conv5 16, pool2, 120, 84, classes.

    28x28 images are padded to LeNet's 32x32 inside the first convolution, as LeCun et al. (1998) did.

    Weights for 3x32x32 and 10 classes: conv 3*6*25+6 = 456, 6*16*25+16 = 2,416; fully connected 400*120+120 = 48,120,
    120*84+84 = 10,164, 84*10+10 = 850; together 62,006. For 1x28x28: 62,006 - 2*6*25 = 61,706.
    """
    _, high, wide = images(task, "lenet5")
    padding = 2 if (high, wide) == (28, 28) else 0
    return cnn(task, "lenet5", width, (6, 16), (120, 84), padding=padding)
