"""CIFAR-10: 50,000 + 10,000 colour pictures of 32x32 pixels, 10 classes.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
Layout (the published python files): ``root/cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Array, Arrays, cached
from fedcross.tasks.reading.params import FileParams, ImageParams, finished, published

BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


class Params(FileParams, ImageParams):
    """Settings of CIFAR: folder, download, normalisation, augmentation and limits."""


def _pickled(path: Path, key: str) -> Any:
    """Return the entry `key` of a published batch or meta file; a DataError if it is damaged."""
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 2 warns of flags in numpy 1's pickles
            return pickle.load(file, encoding="latin1")[key]  # noqa: S301 - the operator's own files
    except Exception as error:  # a damaged pickle raises many kinds
        raise DataError(f"{path}: not a whole CIFAR batch ({error!r}). Copy or download the file again.") from error


def cifar(
    name: str, params: Params, folder: str, batches: Mapping[str, Sequence[str]], meta: str, labels: str, classes: int
) -> Task:
    """Return the task `name`; raw inputs are uint8 ``(n, 3, 32, 32)``.

    `batches` names the files of each part, `meta` the file and `labels` the start of the keys of the labels.
    """
    root, title = params.root / folder, f"CIFAR-{'100' if '100' in name else '10'}"

    def download() -> None:
        from torchvision import datasets

        getattr(datasets, title.replace("-", ""))(str(params.root), download=True)

    def batch(path: Path) -> tuple[Array, Array]:
        x, y = np.asarray(_pickled(path, "data")), np.atleast_1d(_pickled(path, f"{labels}s"))
        if x.dtype != np.uint8 or x.shape != (len(y), 3072):
            raise DataError(f"{path}: data is {x.dtype} {x.shape}, labels {y.shape}; expected uint8 (n, 3072), (n,).")
        return x.reshape(-1, 3, 32, 32), y.astype(np.int64)

    def decode(_: Path) -> Arrays:
        arrays: Arrays = {}
        for part, names in batches.items():
            x, y = zip(*(batch(root / name) for name in names))
            arrays |= {f"x_{part}": np.concatenate(x), f"y_{part}": np.concatenate(y)}
        return arrays

    files = [root / file for names in batches.values() for file in names]
    cure = f"Unpack {folder.replace('-batches-py', '-python')}.tar.gz into {params.root.absolute()}"
    published(title, files, params, f"{cure}, or set task.download=true.", download)
    known = _pickled(root / meta, f"{labels}_names") if (root / meta).is_file() else map(str, range(classes))
    return finished(name, cached(name, files, {}, decode), params, root, tuple(known))


def load(params: Params) -> Task:
    """Return CIFAR-10; raw inputs are uint8 ``(n, 3, 32, 32)``; a DataError names a batch that is missing or wrong."""
    return cifar("cifar10", params, "cifar-10-batches-py", BATCHES, "batches.meta", "label", 10)
