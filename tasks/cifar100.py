"""CIFAR-100: 50,000 + 10,000 colour pictures of 32x32 pixels, with 100 fine or 20 coarse labels.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). FedCross used the 20 coarse
labels (its authors' READMEs and loader); FedCT used the fine ones.
Layout (the published python files): ``root/cifar-100-python/{train,test,meta}``.
"""

from __future__ import annotations

from typing import Literal

from fedcross.tasks import cifar10
from fedcross.tasks.base import Task

BATCHES = {"train": ["train"], "test": ["test"]}
VARIANTS = {"fine": ("cifar100", 100), "coarse": ("cifar100_coarse", 20)}


class Params(cifar10.Params):
    """Settings of CIFAR-100.

    Attributes
    ----------
    labels : {"fine", "coarse"}
        100 classes, or their 20 superclasses.
    """

    labels: Literal["fine", "coarse"] = "fine"


def load(params: Params) -> Task:
    """Return CIFAR-100; raw inputs are uint8 ``(n, 3, 32, 32)``; a DataError names a file that is missing or wrong."""
    name, classes = VARIANTS[params.labels]
    return cifar10.cifar(name, params, "cifar-100-python", BATCHES, "meta", f"{params.labels}_label", classes)
