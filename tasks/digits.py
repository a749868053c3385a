"""Digits: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, so nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.params import ImageParams, limited, stratified

TEST_FRACTION = 0.2


class Params(ImageParams):
    """Settings of the digits: normalisation, augmentation and limits."""


def _file() -> Path:
    """Return scikit-learn's file: a line has the 64 pixels of a digit, then the digit. To import it takes seconds."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits: scikit-learn is not installed, and the digits come with it. Install it.")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise DataError(f"digits: this scikit-learn has no {file}. Install another version.")
    return file


def _decode(store: Store) -> None:
    table = np.loadtxt(_file(), delimiter=",", dtype=np.uint8)
    x, y = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    for part, chosen in zip(("train", "test"), stratified(y, TEST_FRACTION, "digits test split")):
        store.put(f"x_{part}", x[chosen])
        store.put(f"y_{part}", y[chosen])


def load(params: Params) -> Task:
    """Return the digits with a fixed stratified split, 80 % to train and 20 % to test.

    Raw inputs are uint8 in 0..16, shape ``(n, 1, 8, 8)``. The split does not depend on the run's seed, so every run
    is tested on the same examples.
    """
    arrays = cached("digits", [_file()], {}, _decode)
    return Task(
        name="digits",
        train=limited(Examples(arrays["x_train"], arrays["y_train"]), params.limit, "train"),
        test=limited(Examples(arrays["x_test"], arrays["y_test"]), params.limit_test, "test"),
        classes=10,
        shape=(1, 8, 8),
        prepare=params.normaliser(channels=1, scale=16.0),
        augment=params.augmentation(),
        label_names=tuple(str(digit) for digit in range(10)),
    )
