"""CIFAR-10: 50,000 + 10,000 colour pictures of 32x32 pixels, 10 classes.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
Layout (the published python batches): ``root/cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}``.
"""

from __future__ import annotations

import numpy as np

from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.cifar import SHAPE, names, read_batch
from fedcross.tasks.reading.params import FileParams, ImageParams, check_labels, checked, fetch, limited, require

BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}


class Params(FileParams, ImageParams):
    """Settings of CIFAR-10: folder, download, normalisation, augmentation and limits."""


def load(params: Params) -> Task:
    """Return CIFAR-10; raw inputs are uint8 ``(n, 3, 32, 32)``.

    Raises
    ------
    DataError
        If a batch is missing, truncated or holds a label out of range; the message names the file.
    """
    folder = params.root / "cifar-10-batches-py"
    files = [folder / name for part in BATCHES.values() for name in part]
    if params.download:
        from torchvision.datasets import CIFAR10

        fetch(CIFAR10, params.root, "CIFAR-10")
    require(
        files,
        "CIFAR-10",
        f"Unpack cifar-10-python.tar.gz into {params.root.absolute()}, or set task.download=true.",
    )

    def decode(store: Store) -> None:
        for part, batches in BATCHES.items():
            pairs = [read_batch(folder / name, "labels") for name in batches]
            for name, (_, y) in zip(batches, pairs):
                check_labels(y, 10, folder / name)
            store.put(f"x_{part}", np.concatenate([x for x, _ in pairs]))
            store.put(f"y_{part}", np.concatenate([y for _, y in pairs]))

    arrays = cached("cifar10", files, {}, decode)
    return Task(
        name="cifar10",
        train=limited(checked(arrays["x_train"], arrays["y_train"], 10, folder), params.limit, "train"),
        test=limited(checked(arrays["x_test"], arrays["y_test"], 10, folder), params.limit_test, "test"),
        classes=10,
        shape=SHAPE,
        prepare=params.normaliser(channels=3),
        augment=params.augmentation(),
        label_names=names(folder / "batches.meta", "label_names", 10),
    )
