"""CIFAR-10: 50,000 + 10,000 colour pictures of 32x32 pixels, 10 classes.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
Layout (the published python files): ``root/cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}``.
"""

from __future__ import annotations

from fedcross.tasks.base import Task
from fedcross.tasks.reading.cifar import Params, cifar

BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def load(params: Params) -> Task:
    """Return CIFAR-10; raw inputs are uint8 ``(n, 3, 32, 32)``; a DataError names a batch that is missing or wrong."""
    return cifar("cifar10", params, "cifar-10-batches-py", BATCHES, "batches.meta", "label", 10)
