"""ResNet-18: with a 3x3 stem for small images, He et al.'s for large ones, and that of FedCT's authors.

FedCT's paper says of its ResNet-18 only that the first convolution is 3x3 in place of 7x7, and 7x7 for VireoFood-172.
Its authors' code for another method (repository FedCSPC) has two: for CIFAR ``ResNet18_cifar10`` of MOON's code, which
is ``stem=cifar``; for other data its own ``resnet.py``, with a 3x3 kernel for Tiny ImageNet (``stem=authors``) and with
a 7x7 one for VireoFood-172 (``stem=authors_7x7``). Whether FedCT ran on these two is not known, so by default Tiny
ImageNet has the stem of CIFAR, and VireoFood-172 He et al.'s, with its max-pool and one linear layer.
"""

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
    stem : {"cifar", "imagenet", "authors", "authors_7x7"}
        First layers: 3x3 convolution of stride 1; 7x7 of stride 2 and a max-pool 3/2; or 3x3, in the last 7x7, of
        stride 2 and padding 3 without a pool. The last two also have three linear layers, 512-512-512-classes without
        activations between them, of which the third is the classifier.
    """

    stem: Literal["cifar", "imagenet", "authors", "authors_7x7"] = "cifar"


def build(params: Params, task: Task) -> Split:
    """Return torchvision's ResNet-18 with random weights and the chosen stem.

    Weights for 3 channels and 10 classes: 11,173,962 with the small stem (1,728 in its convolution), 11,181,642 with
    the large one (9,408), 11,699,274 with the authors' (1,728, and 2 * (512 * 512 + 512) in two more linear layers),
    11,706,954 with the authors' 7x7 one (9,408).
    """
    from torchvision import models

    channels, _, _ = images(task, "resnet18")
    network = models.resnet18(weights=None, num_classes=task.classes)
    kernel = 7 if params.stem in ("imagenet", "authors_7x7") else 3
    stride, padding = (1, 1) if params.stem == "cifar" else (2, 3)
    network.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
    if params.stem != "imagenet":
        network.maxpool = nn.Identity()
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
    split = halve(network, task.classes, "resnet18")
    if params.stem in ("authors", "authors_7x7"):
        width = split.embedding
        split.features = nn.Sequential(split.features, nn.Linear(width, width), nn.Linear(width, width))
    return split
