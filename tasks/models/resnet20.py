"""ResNet-20 for CIFAR as He et al. (CVPR 2016) define it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedcross.tasks.base import Task
from fedcross.tasks.models._split import NoSettings, Split, images
from fedcross.tasks.models.width import Hidden

Params = NoSettings


class PadChannels(nn.Module):
    """Put `front` zero channels before those that arrive and others behind, at a `stride` (shortcut of option A)."""

    def __init__(self, channels_out: int, front: int, stride: int) -> None:
        super().__init__()
        self.channels_out, self.front, self.stride = channels_out, front, stride

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, channels_out, height/stride, width/stride)``."""
        front = min(self.front, self.channels_out)
        kept = min(x.shape[1], self.channels_out - front)
        behind = self.channels_out - front - kept
        return F.pad(x[:, :kept, :: self.stride, :: self.stride], (0, 0, 0, 0, front, behind))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without weights (option A: every second pixel, zero channels added).

    At stride 2 the shortcut puts `front` zero channels before those that arrive; None changes neither.
    """

    def __init__(self, channels_in: int, hidden: int, channels_out: int, front: int | None) -> None:
        super().__init__()
        stride = 1 if front is None else 2
        self.conv1 = nn.Conv2d(channels_in, hidden, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity() if front is None else PadChannels(channels_out, front, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, ``(batch, channels_out, height/stride, width/stride)``."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        shortcut: Tensor = self.shortcut(x)
        return F.relu(out + shortcut)


def build(params: NoSettings, task: Task, width: Hidden) -> Split:  # noqa: ARG001
    """Return conv3 16, three stages of three blocks with 16, 32, 64 channels, mean over pixels, classes.

    Convolutions start from He et al.'s normal distribution (fan in), as the paper says.

    Weights for 3 channels and 10 classes: 432+32; stage 1: 3*(2*2,304+64) = 14,016; stage 2: 4,608+9,216+128 +
    2*(2*9,216+128) = 51,072; stage 3: 18,432+36,864+256 + 2*(2*36,864+256) = 203,520; classifier 650; together 269,722.
    """
    channels, _, _ = images(task, "resnet20")
    now = width(16)
    layers: list[nn.Module] = [nn.Conv2d(channels, now, 3, padding=1, bias=False), nn.BatchNorm2d(now), nn.ReLU()]
    for size in (16, 32, 64):
        for i in range(3):
            hidden, widens = width(size), size > 16 and i == 0
            out = width(size) if widens else now
            layers.append(Block(now, hidden, out, size // 4 if widens else None))
            now = out
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return Split(features, nn.Linear(now, task.classes))
