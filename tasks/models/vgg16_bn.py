"""VGG16 with batch normalisation for 32x32 images, FedCross's "VGG-16"."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, convolutional, images
from fedcross.tasks.models.pooling import MaxPool2
from fedcross.tasks.models.width import Hidden

BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class Params(Settings):
    """Settings of VGG16.

    Attributes
    ----------
    dropout : float
        Probability after each of the two hidden layers.
    """

    dropout: float = Field(default=0.5, ge=0, lt=1)


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return five blocks of 3x3 convolutions with batch normalisation and pool2; 4096, 4096, classes.

    Weights for 3x32x32 and 10 classes: convolutions 14,714,688, normalisation 2*4,224 = 8,448; fully connected
    512*4096+4096 = 2,101,248, 4096*4096+4096 = 16,781,312, 4096*10+10 = 40,970; together 33,646,666 (the paper says
    more than 130M, which is VGG16 for 224x224). Images must be at least 32 pixels wide and high.
    """
    channels, _, _ = images(task, "vgg16_bn")
    blocks: list[nn.Module] = []
    for filters, repeats in BLOCKS:
        layers: list[nn.Module] = []
        for _ in range(repeats):
            outputs = width(filters)
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            channels = outputs
        blocks.append(nn.Sequential(*layers, MaxPool2()))
    extractor, body = nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])
    return convolutional(extractor, (width(4096), width(4096)), task, "vgg16_bn", body, params.dropout)
