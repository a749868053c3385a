"""FedFusion's CNN for MNIST (Yao et al., ICIP 2019), as its code or as its paper has it."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._split import Split, cnn, xavier
from fedcross.tasks.models.pooling import MaxPool2
from fedcross.tasks.models.width import Hidden


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


def build(params: Params, task: Task, width: Hidden) -> Split:
    """Return conv5 32, pool, conv3 or conv5 64, pool, 512, classes; Xavier weights and zero biases, as the code.

    Weights for 1x28x28 and 10 classes: conv 25*32+32 = 832, then 32*64*9+64 = 18,496 (code) or 32*64*25+64 = 51,264
    (paper); fully connected 3,136*512+512 = 1,606,144, 512*10+10 = 5,130; together 1,630,602 or 1,663,370.
    """
    kernel, pool = (3, partial(nn.MaxPool2d, 3, stride=2, padding=1)) if params.variant == "code" else (5, MaxPool2)
    return xavier(cnn(task, "fedfusion_mnist", width, (32, 64), (512,), (5, kernel), True, params.dropout, pool))
