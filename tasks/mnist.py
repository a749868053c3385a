"""MNIST: 60,000 + 10,000 handwritten digits of 28x28 pixels.

Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
Layout (torchvision's): ``root/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Array, Arrays, cached
from fedcross.tasks.reading.params import FileParams, ImageParams, finished, published

FILES = {"train": "train", "test": "t10k"}


class Params(FileParams, ImageParams):
    """Settings of MNIST: folder, download, normalisation, augmentation and limits."""


def _idx(path: Path, shape: tuple[int, ...]) -> Array:
    """Read one idx file with torchvision; raise DataError naming the file if its examples are not of this shape."""
    from torchvision.datasets import mnist

    try:
        array: Array = mnist.read_sn3_pascalvincent_tensor(str(path)).numpy()
    except Exception as error:  # a damaged file raises many kinds
        raise DataError(f"{path}: not a whole idx file ({error}). Download or copy it again.") from error
    if array.shape[1:] != shape:
        raise DataError(f"{path}: holds an array of shape {array.shape}, expected (n, *{shape}).")
    return array


def load(params: Params) -> Task:
    """Return MNIST; raw inputs are uint8 ``(n, 1, 28, 28)``; a DataError names a file that is missing or damaged."""
    folder = params.root / "MNIST" / "raw"
    images = {part: folder / f"{start}-images-idx3-ubyte" for part, start in FILES.items()}
    labels = {part: folder / f"{start}-labels-idx1-ubyte" for part, start in FILES.items()}
    files = [*images.values(), *labels.values()]

    def download() -> None:
        from torchvision.datasets import MNIST

        MNIST(str(params.root), download=True)

    def decode(_: Path) -> Arrays:
        x = {f"x_{part}": _idx(path, (28, 28))[:, None] for part, path in images.items()}
        return x | {f"y_{part}": _idx(path, ()).astype(np.int64) for part, path in labels.items()}

    cure = f"Put the four unpacked idx files into {folder.absolute()}, or set task.download=true."
    published("MNIST", files, params, cure, download)
    return finished("mnist", cached("mnist", files, {}, decode), params, folder, tuple(map(str, range(10))))
