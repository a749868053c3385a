"""The loop of :mod:`tasks.models.pooling`, compiled with numba at its first call; importing it imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


def _pool(x: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64]) -> None:
    """Write the largest value of each 2x2 window and its place.

    Parameters
    ----------
    x : float array (n, h, w, c), C-contiguous, h and w even, without NaN
    out : array (n, h/2, w/2, c) of x's dtype
    index : int64 array, as `out`
        ``row * w + column`` of the value in its picture. Of equal values the first, as torch.
    """
    n, h, w, c = x.shape
    for i in range(n):
        for row in range(h // 2):
            upper, lower, values, places = x[i, 2 * row], x[i, 2 * row + 1], out[i, row], index[i, row]
            for column in range(w // 2):
                left = 2 * column
                place = 2 * row * w + left
                for k in range(c):
                    best, where = upper[left, k], place
                    v = upper[left + 1, k]
                    if v > best:
                        best, where = v, place + 1
                    v = lower[left, k]
                    if v > best:
                        best, where = v, place + w
                    v = lower[left + 1, k]
                    if v > best:
                        best, where = v, place + w + 1
                    values[column, k] = best
                    places[column, k] = where


pool = numba.njit(nogil=True)(_pool)
