"""ResNet-18: with a 3x3 stem for small images, He et al.'s for large ones, and that of FedCT's authors.

FedCT's paper says of its ResNet-18 only that the first convolution is 3x3, and 7x7 for VireoFood-172. Its authors' code
for another method (repository FedCSPC) has two: MOON's for CIFAR (``stem=cifar``), and its own with a 3x3 kernel for
Tiny ImageNet (``stem=authors``) or a 7x7 one for VireoFood-172 (``stem=authors_7x7``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, images
from fedcross.tasks.models.torchvision import halve
from fedcross.tasks.models.width import Hidden

if TYPE_CHECKING:
    from torchvision.models import ResNet


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


def build(params: Params, task: Task, width: Hidden) -> Split:
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
    inputs = _narrow(network, width)
    linear: list[nn.Module] = []
    for _ in range(2 if params.stem in ("authors", "authors_7x7") else 0):
        outputs = width(512)
        linear.append(nn.Linear(inputs, outputs))
        inputs = outputs
    if inputs != network.fc.in_features:
        network.fc = nn.Linear(inputs, task.classes)
    split = halve(network, task.classes, "resnet18")
    if linear:
        split.features = nn.Sequential(split.features, *linear)
    return split


def _narrow(network: ResNet, width: Hidden) -> int:
    """Make torchvision's ResNet-18 narrower, in place, and return its last number of channels."""
    now = width(64)
    network.conv1, network.bn1 = _sized(network.conv1, network.bn1, network.conv1.in_channels, now)
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        for block in stage:
            hidden, out = width(block.conv1.out_channels), now
            if block.downsample is not None:
                out = width(block.conv2.out_channels)
                block.downsample = nn.Sequential(*_sized(block.downsample[0], block.downsample[1], now, out))
            block.conv1, block.bn1 = _sized(block.conv1, block.bn1, now, hidden)
            block.conv2, block.bn2 = _sized(block.conv2, block.bn2, hidden, out)
            now = out
    return now


def _sized(conv: nn.Conv2d, norm: nn.Module, inputs: int, outputs: int) -> tuple[nn.Conv2d, nn.Module]:
    """Return a convolution and its norm with these channels; the same layers if they have them already."""
    if (conv.in_channels, conv.out_channels) == (inputs, outputs):
        return conv, norm
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    return nn.Conv2d(inputs, outputs, kernel, stride, int(padding), bias=False), nn.BatchNorm2d(outputs)
