"""FEMNIST: handwritten digits and letters of 28x28 pixels, 62 classes, by writer.

Source: S. Caldas et al., "LEAF", arXiv 1812.01097. Two layouts:

- ``leaf``: LEAF's JSON in ``root/femnist/data/{train,test}/*.json``; pixels are k / 255 with 255 for paper, as LEAF
  writes them, and are stored as k (exact).
- ``npz``: one file ``root/femnist/femnist_300writers.npz`` (or `file`) with ``x`` uint8 ``(n, 28, 28)``, ``y``,
  ``users``, ``num_samples`` and ``num_train``: the examples of one writer after another, the training ones first.
"""

from __future__ import annotations

import string
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading import leaf
from fedcross.tasks.reading.cache import Array, Arrays, cached
from fedcross.tasks.reading.params import FileParams, ImageParams, finished, published, read_npz

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
CURE = (
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
    y = leaf.labels(data, len(CLASSES))
    try:
        x = np.asarray(data.x)
        if x.dtype != np.uint8:
            x = x.astype(np.float64) * 255.0
        if len(y) and not (x.min() >= 0 and x.max() <= 255):  # also false for NaN
            raise ValueError(f"pixels from {x.min() / 255} to {x.max() / 255}")
        return np.rint(x.reshape(len(y), 1, 28, 28)).astype(np.uint8), y
    except (ValueError, TypeError) as error:
        raise DataError(f"{data.where}: images are not 784 pixels from 0 to 1 each ({error}).") from error


def _npz_parts(path: Path) -> dict[str, list[leaf.UserData]]:
    """Return the training and test examples of each writer in the npz."""
    content, parts = read_npz(path), {"train": list[leaf.UserData](), "test": list[leaf.UserData]()}
    try:
        x, y, users, counts, kept = (content[n] for n in ("x", "y", "users", "num_samples", "num_train"))
        if not len(x) == len(y) == counts.sum():
            raise ValueError(f"{len(x)} images, {len(y)} labels, but num_samples adds up to {counts.sum()}")
        for user, end, count, first in zip(users, np.cumsum(counts), counts, kept, strict=True):
            middle = end - count + first
            for part, rows in (("train", slice(end - count, middle)), ("test", slice(middle, end))):
                parts[part].append(leaf.UserData(f"{path}: user {user!r}", str(user), x[rows], y[rows]))
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not FEMNIST by writer ({error}). Copy the file again.") from error
    return parts


def load(params: Params) -> Task:
    """Return FEMNIST with its writers as users; raw inputs are uint8 ``(n, 1, 28, 28)``, 255 for paper."""
    folder = params.root / "femnist"
    if params.source == "leaf":
        files = leaf.find_files(folder / "data", "FEMNIST", params, CURE)
    else:
        published("FEMNIST", [folder / params.file], params, CURE)
        files = {"npz": [folder / params.file]}

    def decode(_: Path) -> Arrays:
        parts: leaf.Parts = {part: leaf.read(paths) for part, paths in files.items()}
        return leaf.decode(_npz_parts(files["npz"][0]) if "npz" in files else parts, _encode)

    arrays = cached("femnist", chain(*files.values()), {"source": params.source}, decode)
    return finished("femnist", arrays, params, folder, tuple(CLASSES))
