"""The CNN of FL-SAM's CIFAR tables (FedGMT's authors): two 5x5 convolutions with padding, one hidden layer of 512."""

from __future__ import annotations

from fedcross.tasks.base import Task
from fedcross.tasks.models._split import NoSettings, Split, cnn
from fedcross.tasks.models.width import Hidden

Params = NoSettings


def build(params: NoSettings, task: Task, width: Hidden) -> Split:  # noqa: ARG001
    """Return conv5 32, pool2, conv5 64, pool2, 512, classes, with padding 2.

    Weights for 3x32x32 and 10 classes: conv 3*32*25+32 = 2,432, 32*64*25+64 = 51,264; fully connected (64*8*8)*512+512
    = 2,097,664, 512*10+10 = 5,130; together 2,156,490.
    """
    return cnn(task, "cnn_fedavg", width, (32, 64), (512,), padding=True)
