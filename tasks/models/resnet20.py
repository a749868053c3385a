"""ResNet-20 for CIFAR as He et al. (CVPR 2016) define it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, images


class Params(Settings):
    """The network has no settings."""


class PadChannels(nn.Module):
    """Puts as many zero channels before as behind those that arrive (the shortcut of option A), at a stride.

    Parameters
    ----------
    channels_in, channels_out : int
        Channels before and after.
    stride : int
        Of the pixels.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.channels_in, self.channels_out, self.stride = channels_in, channels_out, stride
        self.front = (channels_out - channels_in) // 2

    def resize(self, channels_in: int, channels_out: int) -> None:
        """Return the first `channels_out` channels of what the whole layer makes of the first `channels_in`."""
        self.channels_in, self.channels_out = channels_in, channels_out

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, channels_out, height/stride, width/stride)``."""
        front = min(self.front, self.channels_out)
        kept = min(self.channels_in, self.channels_out - front)
        behind = self.channels_out - front - kept
        return F.pad(x[:, :kept, :: self.stride, :: self.stride], (0, 0, 0, 0, front, behind))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without weights (option A: every second pixel, zero channels added).

    Parameters
    ----------
    channels_in, channels_out : int
        Channels before and after.
    stride : int
        Of the first convolution and the shortcut.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        same = channels_in == channels_out
        self.shortcut: nn.Module = nn.Identity() if same else PadChannels(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, ``(batch, channels_out, height/stride, width/stride)``."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        shortcut: Tensor = self.shortcut(x)
        return F.relu(out + shortcut)


def build(params: Params, task: Task) -> Split:  # noqa: ARG001
    """Return conv3 16, three stages of three blocks with 16, 32, 64 channels, mean over pixels, classes.

    Convolutions start from He et al.'s normal distribution (fan in), as the paper says.

    Weights for 3 channels and 10 classes: 432+32; stage 1: 3*(2*2,304+64) = 14,016; stage 2: 4,608+9,216+128 +
    2*(2*9,216+128) = 51,072; stage 3: 18,432+36,864+256 + 2*(2*36,864+256) = 203,520; classifier 650; together 269,722.
    """
    channels, _, _ = images(task, "resnet20")
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for stage, out in enumerate((16, 32, 64)):
        for i in range(3):
            layers.append(Block(width, out, stride=2 if stage > 0 and i == 0 else 1))
            width = out
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return Split(features, nn.Linear(64, task.classes))
