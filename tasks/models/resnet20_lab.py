"""What FedCross's code calls ResNet-20: a pre-activation bottleneck network of six blocks."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, images
from fedcross.tasks.models.width import Hidden

EXPANSION = 4


class Params(Settings):
    """Settings of the lab's ResNet-20.

    Attributes
    ----------
    final_norm : bool
        Apply the last normalisation and ReLU, as pre-activation networks do. The authors declare them and never
        call them, so the default leaves them out; their weights are there either way, and without gradient.
    """

    final_norm: bool = False


class Bottleneck(nn.Module):
    """Normalise, ReLU, convolve: 1x1, 3x3, 1x1, beside a shortcut, whose convolution is left out without a stride."""

    def __init__(self, channels_in: int, first: int, second: int, channels_out: int, stride: int | None) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, first, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(first)
        self.conv2 = nn.Conv2d(first, second, 3, stride or 1, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(second)
        self.conv3 = nn.Conv2d(second, channels_out, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride is not None:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, ``(batch, channels_out, height/stride, width/stride)``."""
        out: Tensor = self.conv1(F.relu(self.norm1(x)))
        out = self.conv2(F.relu(self.norm2(out)))
        out = self.conv3(F.relu(self.norm3(out)))
        shortcut: Tensor = self.shortcut(x)
        return out + shortcut


class Features(nn.Module):
    """Everything before the classifier."""

    def __init__(self, channels: int, final_norm: bool, width: Hidden) -> None:
        super().__init__()
        now = width(16)
        layers: list[nn.Module] = [nn.Conv2d(channels, now, 3, padding=1, bias=False)]
        if channels == 1:  # the authors' variant for MNIST and FEMNIST
            layers.append(nn.MaxPool2d(3, stride=1, padding=1))
        for size in (16, 32, 64):
            for i in range(2):
                first, second = width(size), width(size)
                out = width(EXPANSION * size) if i == 0 else now
                stride = None if i else 1 if size == 16 else 2
                layers.append(Bottleneck(now, first, second, out, stride))
                now = out
        self.channels = now
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(now if final_norm else 64 * EXPANSION)
        self.final_norm = final_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings, ``(batch, 256)``."""
        x = self.blocks(x)
        if self.final_norm:
            x = F.relu(self.norm(x))
        return x.mean(dim=(2, 3))


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return conv3 16, stages of two bottlenecks with 16, 32, 64 (times 4) channels, mean over pixels, classes.

    As in the authors' code, normalisation starts with weight .5, convolutions from a normal distribution of variance
    2 / (outputs * kernel area), and one-channel images pass a max-pool 3/1 after the first convolution.

    Weights for 3 channels and 10 classes: first convolution 432; stages 4,704+4,544, 23,808+17,792, 94,720+70,400;
    last normalisation 512; classifier 2,570; together 219,482 (the paper says about 30M). Block 1 of stage 1, for
    example: 32 + 16*16 + 32 + 16*16*9 + 32 + 16*64, shortcut 16*64.
    """
    channels, _, _ = images(task, "resnet20_lab")
    features = Features(channels, params.final_norm, width)
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d):
            area = layer.kernel_size[0] * layer.kernel_size[1]
            nn.init.normal_(layer.weight, std=math.sqrt(2 / (area * layer.out_channels)))
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.constant_(layer.weight, 0.5)
    return Split(features, nn.Linear(features.channels, task.classes))
