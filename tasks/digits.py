"""Digits: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, so nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Arrays, cached
from fedcross.tasks.reading.params import ImageParams, finished, split_parts


class Params(ImageParams):
    """Settings of the digits: normalisation, augmentation and limits."""


def load(params: Params) -> Task:
    """Return the digits with a fixed stratified split, 80 % to train and 20 % to test, the same for every seed.

    Raw inputs are uint8 in 0..16, shape ``(n, 1, 8, 8)``.
    """
    package = find_spec("sklearn")  # to import it takes seconds; a line of its file has 64 pixels, then the digit
    file = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz" if package else Path()
    if not file.is_file():
        raise DataError("digits: they come with scikit-learn, which is not installed. Install it.")

    def decode(_: Path) -> Arrays:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        whole: Arrays = {"x": table[:, :-1].reshape(-1, 1, 8, 8), "y": table[:, -1].astype(np.int64)}
        return split_parts({"train": whole}, 0.2, "digits test split")

    arrays, prepare = cached("digits", [file], {}, decode), params.normaliser(channels=1, scale=16.0)
    return finished("digits", arrays, params, file, tuple(map(str, range(10))), prepare=prepare)
