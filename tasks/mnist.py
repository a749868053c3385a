"""MNIST: 60,000 + 10,000 handwritten digits of 28x28 pixels.

Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86 (1998).
Layout (torchvision's): ``root/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Arrays, cached
from fedcross.tasks.reading.params import FileParams, ImageParams, finished, published


class Params(FileParams, ImageParams):
    """Settings of MNIST: folder, download, normalisation, augmentation and limits."""


def load(params: Params) -> Task:
    """Return MNIST; raw inputs are uint8 ``(n, 1, 28, 28)``; a DataError names a file that is missing or damaged."""
    folder = params.root / "MNIST" / "raw"
    parts = {"train": "train", "test": "t10k"}
    kinds = {"x": ("images-idx3", (28, 28)), "y": ("labels-idx1", ())}
    files = {f"{key}_{p}": folder / f"{start}-{kinds[key][0]}-ubyte" for key in kinds for p, start in parts.items()}

    def decode(_: Path) -> Arrays:
        from torchvision.datasets import mnist

        arrays: Arrays = {}
        for name, path in files.items():
            try:
                arrays[name] = mnist.read_sn3_pascalvincent_tensor(str(path)).numpy()
            except Exception as error:  # a damaged file raises many kinds
                raise DataError(f"{path}: not a whole idx file ({error}). Download or copy it again.") from error
            if arrays[name].shape[1:] != (shape := kinds[name[0]][1]):
                raise DataError(f"{path}: holds an array of shape {arrays[name].shape}, expected (n, *{shape}).")
        return {name: a[:, None] if name[0] == "x" else a.astype(np.int64) for name, a in arrays.items()}

    def download() -> None:
        from torchvision.datasets import MNIST

        MNIST(str(params.root), download=True)

    cure = f"Put the four unpacked idx files into {folder.absolute()}, or set task.download=true."
    published("MNIST", [*files.values()], params, cure, download)
    return finished("mnist", cached("mnist", files.values(), {}, decode), params, folder, tuple(map(str, range(10))))
