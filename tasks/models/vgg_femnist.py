"""FedCross's "VGG" for FEMNIST: five convolutions without batch normalisation."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedcross.tasks.base import Task
from fedcross.tasks.models._split import NoSettings, Split, images, output_shape
from fedcross.tasks.models.pooling import MaxPool2, MeanPool
from fedcross.tasks.models.width import Hidden

Params = NoSettings


def build(params: NoSettings, task: Task, width: Hidden) -> Split:  # noqa: ARG001
    """Return the variant of the authors' FedMR and FedMut code.

    A 1x1 convolution with a border of one pixel to 64, conv3 64, pool 2/1, conv3 128, pool 2/1, conv3 256, conv3 512,
    pool2, mean over a 7x7 grid, 256, classes; nothing between the last two linear layers, as there.

    Weights for 1x28x28 and 62 classes: conv 64+64 = 128, 36,928, 73,856, 295,168, 1,180,160; fully connected
    25,088*256+256 = 6,422,784, 256*62+62 = 15,934; together 8,024,958.
    """
    channels, _, _ = images(task, "vgg_femnist")
    sizes = [channels, *map(width, (64, 64, 128, 256, 512))]
    extractor = nn.Sequential(
        *(nn.Conv2d(sizes[0], sizes[1], 1, padding=1), nn.ReLU()),
        *(nn.Conv2d(sizes[1], sizes[2], 3, padding=1), nn.MaxPool2d(2, stride=1), nn.ReLU()),
        *(nn.Conv2d(sizes[2], sizes[3], 3, padding=1), nn.MaxPool2d(2, stride=1), nn.ReLU()),
    )
    body = nn.Sequential(
        *(nn.Conv2d(sizes[3], sizes[4], 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(sizes[4], sizes[5], 3, padding=1), MaxPool2(), nn.ReLU()),
        MeanPool(7),
    )
    output_shape(nn.Sequential(extractor, body), task, "vgg_femnist")
    last = width(256)
    features = OrderedDict(extractor=extractor, body=body, flatten=nn.Flatten(), fc1=nn.Linear(sizes[5] * 7 * 7, last))
    return Split(nn.Sequential(features), nn.Linear(last, task.classes), extractor_channels=sizes[3])
