"""Weighted mean of models, which nearly every method uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcross.strategies.wire.records import Arrays


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Return ``sum_i weights[i] * models[i] / sum(weights)``, entry by entry.

    Floating entries keep their dtype. Integer entries (batch-normalisation counters) are averaged in float64 and
    truncated towards zero, so they stay integers.

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
        mean[name] = np.asarray(np.trunc(accumulated + 1e-9) if first.dtype.kind != "f" else accumulated).astype(
            first.dtype, copy=False
        )
    return mean
