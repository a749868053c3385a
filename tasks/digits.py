"""Digits: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, so nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Arrays, cached
from fedcross.tasks.reading.params import ImageParams, finished, split_parts


class Params(ImageParams):
    """Settings of the digits: normalisation, augmentation and limits."""


def load(params: Params) -> Task:
    """Return the digits with a fixed stratified split, 80 % to train and 20 % to test, the same for every seed.

    Raw inputs are uint8 in 0..16, shape ``(n, 1, 8, 8)``.
    """

    def decode(_: Path) -> Arrays:
        from sklearn.datasets import load_digits  # takes seconds

        found = load_digits()
        whole: Arrays = {"x": found.images[:, None].astype(np.uint8), "y": found.target.astype(np.int64)}
        return split_parts({"train": whole}, 0.2, "digits test split")

    arrays, prepare = cached("digits", [], {}, decode), params.normaliser(channels=1, scale=16.0)
    return finished("digits", arrays, params, Path("digits"), tuple(map(str, range(10))), prepare=prepare)
