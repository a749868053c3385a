"""From arrays of one file, or of a training and a test file, to the two parts of a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedcross.tasks.base import Examples
from fedcross.tasks.reading.cache import Array, Arrays, Store
from fedcross.tasks.reading.params import LimitParams, checked, limited, stratified

PARTS = ("train", "test")


def put_parts(parts: Mapping[str, Arrays], fraction: float, purpose: str, store: Store) -> None:
    """Store the arrays ``x``, ``y`` (and ``u``) of each part as ``x_train`` and so on.

    Without a part ``test``, `fraction` of every class of the part ``train`` becomes it.
    """
    both = dict(parts)
    if "test" not in both:
        whole = both["train"]
        kept, held = stratified(whole["y"], fraction, purpose)
        both = {part: {key: a[rows] for key, a in whole.items()} for part, rows in (("train", kept), ("test", held))}
    for part, arrays in both.items():
        for key, array in arrays.items():
            store.put(f"{key}_{part}", array)


def examples(arrays: Arrays, classes: int, where: Path, params: LimitParams) -> tuple[Examples, Examples]:
    """Return training and test examples from what :func:`put_parts` stored, checked and limited."""
    limits = (params.limit, params.limit_test)
    train, test = (
        limited(
            checked(
                arrays[f"x_{part}"], arrays[f"y_{part}"], classes, where, arrays.get(f"u_{part}"), empty=part == "test"
            ),
            limit,
            part,
        )
        for part, limit in zip(PARTS, limits)
    )
    return train, test


def moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each column of `x` ``(n, features)``; 1 in place of a deviation of 0."""
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    return tuple(float(m) for m in mean), tuple(float(s) if s > 0 else 1.0 for s in std)
