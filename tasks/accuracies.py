"""Statistics of accuracies: their spread over clients, and the smoothed accuracy over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Evaluations in the moving mean of the papers' smoothed accuracy.
WINDOW = 10


def spread(accuracies: Sequence[float], name: str) -> dict[str, float]:
    """Return the worst tenth and the standard deviation of clients' accuracies, as ``NAME_worst_tenth``, ``NAME_std``.

    The worst tenth is the mean over the tenth of the clients with the lowest accuracies, at least one.
    """
    worst = sorted(accuracies)[: max(1, len(accuracies) // 10)]
    return {f"{name}_worst_tenth": float(np.mean(worst)), f"{name}_std": float(np.std(accuracies))}


@dataclass(frozen=True)
class Smoothed:
    """Largest moving mean over `window` evaluations and the standard deviation of those evaluations, in [0, 1]."""

    mean: float
    std: float
    window: int


def smoothed(accuracies: npt.NDArray[np.float64], window: int = WINDOW) -> Smoothed:
    """Return the papers' smoothed accuracy: the maximum over time of a moving mean, and the spread inside that window.

    `accuracies` (evaluations,) are in the order of the rounds; a curve shorter than `window` is one window. The logger
    in the public code of FedCross's laboratory does this. The spread is the population standard deviation (divisor
    `window`); of equal means the earliest counts.
    """
    if accuracies.size == 0:
        return Smoothed(math.nan, math.nan, 0)
    width = min(window, accuracies.size)
    windows = np.lib.stride_tricks.sliding_window_view(accuracies, width)
    best = windows[int(np.argmax(windows.mean(axis=1)))]
    return Smoothed(float(best.mean()), float(best.std()), width)
