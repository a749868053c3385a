"""FedFusion's CNN for MNIST (Yao et al., ICIP 2019), as its code or as its paper has it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, block, convolutional, images, xavier
from fedcross.tasks.models.pooling import MaxPool2


class Params(Settings):
    """Settings of FedFusion's CNN.

    Attributes
    ----------
    variant : {"code", "paper"}
        Second convolution and pools: 3x3 and pool 3/2 in the code, 5x5 and pool 2 in the paper.
    dropout : float
        Probability after the hidden layer; .2 in the authors' code, unstated in the paper.
    """

    variant: Literal["code", "paper"] = "code"
    dropout: float = Field(default=0.2, ge=0, lt=1)


def build(params: Params, task: Task) -> Split:
    """Return conv5 32, pool, conv3 or conv5 64, pool, 512, classes; Xavier weights and zero biases, as the code.

    Weights for 1x28x28 and 10 classes: conv 25*32+32 = 832, then 32*64*9+64 = 18,496 (code) or 32*64*25+64 = 51,264
    (paper); fully connected 3,136*512+512 = 1,606,144, 512*10+10 = 5,130; together 1,630,602 or 1,663,370.
    """
    channels, _, _ = images(task, "fedfusion_mnist")
    kernel = 3 if params.variant == "code" else 5

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, stride=2, padding=1) if params.variant == "code" else MaxPool2()

    extractor = nn.Sequential(*block(channels, 32, 5, 2, pool()), *block(32, 64, kernel, kernel // 2, pool()))
    return xavier(convolutional(extractor, (512,), task, "fedfusion_mnist", dropout=params.dropout))
