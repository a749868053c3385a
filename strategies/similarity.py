"""How alike two models are: (m, m) float64 matrices in which larger means more similar.

``cosine``, ``paper`` and ``euclidean`` come from one Gram matrix. The diagonal is filled like every other pair; the
selections ignore it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def cosine(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| |y|)``; 0 where a norm is 0 (as torch does)."""
    norms = np.sqrt(np.diag(gram))
    scale = np.outer(norms, norms)
    result = np.zeros_like(gram)
    np.divide(gram, scale, out=result, where=scale != 0)
    return result
