"""Weighted mean of models, which nearly every method uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcross.strategies.pool.layout import Array, Arrays
from fedcross.strategies.pool.pool import precise


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Return ``sum_i weights[i] * models[i] / sum(weights)``, entry by entry.

    Floating entries keep their dtype. Integer entries (batch-normalisation counters) are averaged in float64 and
    truncated towards zero, so they stay integers; see :func:`strategies.pool.pool.precise` for large ones.

    Parameters
    ----------
    models : sequence of Arrays
        At least one model; all with the same names, shapes and dtypes.
    weights : sequence of float
        One weight of 0 or more per model, not all zero.

    Returns
    -------
    Arrays
        Newly allocated.
    """
    total = float(sum(weights))
    shares = [w / total for w in weights]
    mean: Arrays = {}
    for name, first in models[0].items():
        kind = first.dtype if first.dtype.kind == "f" else np.dtype(np.float64)
        accumulated = np.multiply(first, shares[0], dtype=kind)
        for model, share in zip(models[1:], shares[1:]):
            accumulated += np.multiply(model[name], share, dtype=kind)
        if first.dtype.kind == "f":
            mean[name] = np.asarray(accumulated).astype(first.dtype, copy=False)
        else:
            mean[name] = truncated(accumulated, first.dtype)
            values = np.stack([model[name] for model in models]).reshape(len(models), -1)
            precise(mean[name].reshape(1, -1), values, np.array([shares]))
    return mean


def truncated(values: Array, kind: np.dtype[Any]) -> Array:
    """Return float64 `values` as integers of `kind`: truncated towards zero, no larger than these can be."""
    whole = np.trunc(values + 1e-9)
    if kind.kind != "b":
        ends = np.iinfo(kind)
        largest = float(ends.max)  # of int64 it is one too large
        whole = np.clip(whole, ends.min, largest if int(largest) == ends.max else np.nextafter(largest, 0))
    return np.asarray(whole).astype(kind)  # np.clip returns no array of a scalar
