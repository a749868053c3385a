"""MNIST: 60,000 + 10,000 handwritten digits of 28x28 pixels.

Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
Layout (torchvision's): ``root/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte``.
"""

from __future__ import annotations

from pathlib import Path

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Array, Store, cached
from fedcross.tasks.reading.params import FileParams, ImageParams, checked, fetch, limited, require

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class Params(FileParams, ImageParams):
    """Settings of MNIST: folder, download, normalisation, augmentation and limits."""


def _idx(path: Path, dimensions: int) -> Array:
    """Read one idx file with torchvision; raise DataError naming the file if it is not whole."""
    from torchvision.datasets import mnist

    read = mnist.read_image_file if dimensions == 3 else mnist.read_label_file
    try:
        array: Array = read(str(path)).numpy()
    except (AssertionError, ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
        raise DataError(
            f"{path}: not a whole idx file of {dimensions} dimensions ({error}). "
            "Delete it and set task.download=true, or copy it again."
        ) from error
    return array


def load(params: Params) -> Task:
    """Return MNIST; raw inputs are uint8 ``(n, 1, 28, 28)``.

    Raises
    ------
    DataError
        If a file is missing or damaged.
    """
    folder = params.root / "MNIST" / "raw"
    files = [folder / name for pair in FILES.values() for name in pair]
    if params.download:
        from torchvision.datasets import MNIST

        fetch(MNIST, params.root, "MNIST")
    require(files, "MNIST", f"Put the four unpacked idx files into {folder.absolute()}, or set task.download=true.")

    def decode(store: Store) -> None:
        for part, (images, labels) in FILES.items():
            x, y = _idx(folder / images, 3), _idx(folder / labels, 1)
            if x.shape[1:] != (28, 28):
                raise DataError(f"{folder / images}: images of {x.shape[1:]} pixels, expected (28, 28).")
            examples = checked(x[:, None], y, 10, folder / labels)
            store.put(f"x_{part}", examples.x)
            store.put(f"y_{part}", examples.y)

    arrays = cached("mnist", files, {}, decode)
    return Task(
        name="mnist",
        train=limited(checked(arrays["x_train"], arrays["y_train"], 10, folder), params.limit, "train"),
        test=limited(checked(arrays["x_test"], arrays["y_test"], 10, folder), params.limit_test, "test"),
        classes=10,
        shape=(1, 28, 28),
        prepare=params.normaliser(channels=1),
        augment=params.augmentation(),
        label_names=tuple(str(digit) for digit in range(10)),
    )
