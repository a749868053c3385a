"""CIFAR-100: 50,000 + 10,000 colour pictures of 32x32 pixels, with 100 fine or 20 coarse labels.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). FedCross used the 20 coarse
labels (three of its authors' READMEs say so, and their loader reads them); FedCT used the fine ones.
Layout (the published python files): ``root/cifar-100-python/{train,test,meta}``.
"""

from __future__ import annotations

from typing import Literal

from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.cifar import SHAPE, names, read_batch
from fedcross.tasks.reading.params import FileParams, ImageParams, check_labels, checked, fetch, limited, require

CLASSES = {"fine": 100, "coarse": 20}


class Params(FileParams, ImageParams):
    """Settings of CIFAR-100.

    Attributes
    ----------
    labels : {"fine", "coarse"}
        100 classes, or their 20 superclasses.
    """

    labels: Literal["fine", "coarse"] = "fine"


def load(params: Params) -> Task:
    """Return CIFAR-100; raw inputs are uint8 ``(n, 3, 32, 32)``.

    Raises
    ------
    DataError
        If a file is missing, truncated or holds a label out of range; the message names the file.
    """
    folder = params.root / "cifar-100-python"
    files = [folder / "train", folder / "test"]
    if params.download:
        from torchvision.datasets import CIFAR100

        fetch(CIFAR100, params.root, "CIFAR-100")
    require(
        files,
        "CIFAR-100",
        f"Unpack cifar-100-python.tar.gz into {params.root.absolute()}, or set task.download=true.",
    )

    def decode(store: Store) -> None:
        for path in files:
            x, fine, coarse = read_batch(path, "fine_labels", "coarse_labels")
            store.put(f"x_{path.name}", x)
            for kind, y in (("fine", fine), ("coarse", coarse)):
                check_labels(y, CLASSES[kind], path)
                store.put(f"y_{path.name}_{kind}", y)

    arrays = cached("cifar100", files, {}, decode)  # both kinds of label in one entry
    classes = CLASSES[params.labels]
    train, test = (
        checked(arrays[f"x_{part}"], arrays[f"y_{part}_{params.labels}"], classes, folder) for part in ("train", "test")
    )
    return Task(
        name="cifar100" if params.labels == "fine" else "cifar100_coarse",
        train=limited(train, params.limit, "train"),
        test=limited(test, params.limit_test, "test"),
        classes=classes,
        shape=SHAPE,
        prepare=params.normaliser(channels=3),
        augment=params.augmentation(),
        label_names=names(folder / "meta", f"{params.labels}_label_names", classes),
    )
