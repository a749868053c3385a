"""FedCross's "CNN" for FEMNIST."""

from __future__ import annotations

from fedcross.tasks.base import Task
from fedcross.tasks.models._split import NoSettings, Split, cnn
from fedcross.tasks.models.width import Hidden

Params = NoSettings


def build(params: NoSettings, task: Task, width: Hidden) -> Split:  # noqa: ARG001
    """Return conv5 16, pool2, conv5 32, pool2, 256, classes.

    Weights for 1x28x28 and 62 classes: conv 25*16+16 = 416, 16*32*25+32 = 12,832; fully connected 512*256+256 =
    131,328, 256*62+62 = 15,934; together 160,510. The authors' code declares a dropout that it never calls: left out.
    """
    return cnn(task, "cnn_femnist", width, (16, 32), (256,))
