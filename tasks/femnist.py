"""FEMNIST: handwritten digits and letters of 28x28 pixels, 62 classes, by writer.

Source: S. Caldas et al., "LEAF", arXiv 1812.01097. Two layouts:

- ``leaf``: LEAF's JSON in ``root/femnist/data/{train,test}/*.json``; pixels are k / 255 with 255 for paper, as LEAF
  writes them, and are stored as k (exact).
- ``npz``: one file ``root/femnist/femnist_300writers.npz`` (or `file`) with ``x`` uint8 ``(n, 28, 28)``, ``y``,
  ``users``, ``num_samples`` and ``num_train``: the examples of one writer after another, the training ones first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading import leaf
from fedcross.tasks.reading.cache import Array, Store, cached
from fedcross.tasks.reading.npz import read_npz
from fedcross.tasks.reading.params import FileParams, ImageParams, require

CLASSES = 62
HELP = (
    "Make LEAF's files with its data/femnist/preprocess.sh (-s niid -t sample) and put data/train and data/test here, "
    "or give the npz of 300 writers with task.source=npz."
)


class Params(FileParams, ImageParams):
    """Settings of FEMNIST.

    Attributes
    ----------
    source : {"leaf", "npz"}
        Which layout to read.
    file : str
        Name of the npz in ``root/femnist``.
    """

    source: Literal["leaf", "npz"] = "leaf"
    file: str = "femnist_300writers.npz"


def _encode(data: leaf.UserData) -> tuple[Array, Array]:
    """Return uint8 images ``(n, 1, 28, 28)`` and labels of one writer."""
    y = leaf.labels(data, CLASSES)
    if len(y) == 0:
        return np.empty((0, 1, 28, 28), np.uint8), y
    try:
        pixels = np.asarray(data.x, dtype=np.float64).reshape(len(y), -1)
    except (ValueError, TypeError) as error:
        raise DataError(f"{data.where}: images are not lists of numbers of one length ({error}).") from error
    if pixels.shape[1] != 784:
        raise DataError(f"{data.where}: images of {pixels.shape[1]} pixels, expected 784.")
    if not (pixels.min() >= 0.0 and pixels.max() <= 1.0):  # also false for NaN
        raise DataError(f"{data.where}: pixels from {pixels.min()} to {pixels.max()}, expected 0 to 1.")
    return np.rint(pixels * 255.0).astype(np.uint8).reshape(-1, 1, 28, 28), y


def _npz_users(path: Path, part: str) -> Iterator[leaf.UserData]:
    """Yield the training or test examples of each writer in the npz, pixels scaled as in LEAF's files."""
    content = read_npz(path, ("x", "y", "users", "num_samples", "num_train"))
    ends = np.cumsum(content["num_samples"])
    if len(content["x"]) != len(content["y"]) or len(ends) == 0 or ends[-1] != len(content["y"]):
        raise DataError(
            f"{path}: {len(content['x'])} images, {len(content['y'])} labels, but num_samples adds up to "
            f"{ends[-1] if len(ends) else 0}."
        )
    for user, end, count, kept in zip(content["users"], ends, content["num_samples"], content["num_train"]):
        first, middle = int(end) - int(count), int(end) - int(count) + int(kept)
        own = slice(first, middle) if part == "train" else slice(middle, int(end))
        yield leaf.UserData(path, str(user), content["x"][own], content["y"][own])


def _encode_npz(data: leaf.UserData) -> tuple[Array, Array]:
    x = np.asarray(data.x)
    if x.dtype != np.uint8 or x.shape[1:] != (28, 28):
        raise DataError(f"{data.file}: x is {x.dtype} of {x.shape[1:]} pixels, expected uint8 of (28, 28).")
    return x[:, None], leaf.labels(data, CLASSES)


def load(params: Params) -> Task:
    """Return FEMNIST with its writers as users; raw inputs are uint8 ``(n, 1, 28, 28)``, 255 for paper.

    Raises
    ------
    DataError
        If files are missing or wrong; the message names the file and the writer.
    """
    leaf.no_download(params.download, "FEMNIST", HELP)
    folder = params.root / "femnist"
    if params.source == "leaf":
        files = leaf.find_files(folder / "data", "FEMNIST", HELP)
        sources = [path for paths in files.values() for path in paths]
    else:
        sources = [folder / params.file]
        require(sources, "FEMNIST", HELP)

    def decode(store: Store) -> None:
        if params.source == "leaf":
            leaf.decode({part: leaf.read_all(files[part]) for part in leaf.PARTS}, _encode, store)
        else:
            leaf.decode({part: _npz_users(sources[0], part) for part in leaf.PARTS}, _encode_npz, store)

    arrays = cached("femnist", sources, {"source": params.source}, decode)
    examples = leaf.examples(arrays, CLASSES, folder, params)
    digits, upper, lower = range(48, 58), range(65, 91), range(97, 123)
    return Task(
        name="femnist",
        train=examples["train"],
        test=examples["test"],
        classes=CLASSES,
        shape=(1, 28, 28),
        prepare=params.normaliser(channels=1),
        augment=params.augmentation(),
        label_names=tuple(chr(code) for codes in (digits, upper, lower) for code in codes),
        user_names=tuple(str(name) for name in arrays["names"]),
    )
