"""ResNet-18: FedCT's for small images (3x3 stem, no max-pool) and He et al.'s for large ones."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, images
from fedcross.tasks.models.torchvision import halve


class Params(Settings):
    """Settings of ResNet-18.

    Attributes
    ----------
    stem : {"cifar", "imagenet"}
        First layers: 3x3 convolution of stride 1, or 7x7 of stride 2 and a max-pool 3/2.
    """

    stem: Literal["cifar", "imagenet"] = "cifar"


def build(params: Params, task: Task) -> Split:
    """Return torchvision's ResNet-18 with random weights and the chosen stem.

    Weights for 3 channels and 10 classes: 11,173,962 with the small stem (1,728 in its convolution), 11,181,642 with
    the large one (9,408).
    """
    from torchvision import models

    channels, _, _ = images(task, "resnet18")
    network = models.resnet18(weights=None, num_classes=task.classes)
    if params.stem == "cifar":
        network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    else:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
    return halve(network, task.classes, "resnet18")
