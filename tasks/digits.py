"""Digits: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, so nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

import numpy as np

from tasks.base import Examples, Task
from tasks.reading.params import ImageParams, limited, stratified

TEST_FRACTION = 0.2


class Params(ImageParams):
    """Settings of the digits: normalisation, augmentation and limits."""


def load(params: Params) -> Task:
    """Return the digits with a fixed stratified split, 80 % to train and 20 % to test.

    Raw inputs are uint8 in 0..16, shape ``(n, 1, 8, 8)``. The split does not depend on the run's seed, so every run
    is tested on the same examples.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = bunch.images.astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    train, test = stratified(y, TEST_FRACTION, "digits test split")
    return Task(
        name="digits",
        train=limited(Examples(x[train], y[train]), params.limit, "train"),
        test=limited(Examples(x[test], y[test]), params.limit_test, "test"),
        classes=10,
        shape=(1, 8, 8),
        prepare=params.normaliser(channels=1, scale=16.0),
        augment=params.augmentation(),
        label_names=tuple(str(digit) for digit in range(10)),
    )
