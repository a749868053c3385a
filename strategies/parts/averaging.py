"""Weighted mean of models, which nearly every method uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcross.strategies.pool.pool import Arrays, mixed_integers


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Return ``sum_i weights[i] * models[i] / sum(weights)``, entry by entry, newly allocated.

    Floating entries keep their dtype. Integer entries (batch-normalisation counters) are averaged in float64 as
    :func:`strategies.pool.pool.mixed_integers` says.

    Parameters
    ----------
    models : sequence of Arrays
        At least one model; all with the same names, shapes and dtypes.
    weights : sequence of float
        One weight of 0 or more per model, not all zero.
    """
    total = float(sum(weights))
    shares = [w / total for w in weights]
    mean: Arrays = {}
    for name, first in models[0].items():
        if first.dtype.kind == "f":
            accumulated = np.multiply(first, shares[0], dtype=first.dtype)
            for model, share in zip(models[1:], shares[1:]):
                accumulated += np.multiply(model[name], share, dtype=first.dtype)
            mean[name] = np.asarray(accumulated)
        else:
            values = np.stack([model[name] for model in models]).reshape(len(models), -1)
            mean[name] = mixed_integers(values, np.array([shares])).reshape(first.shape)
    return mean
