"""Two clients with one example each and a linear model of four weights, and rounds of a method on them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.bench import descent, play, two_layers

#: Client 0: x = (1, 2), label 0; client 1: x = (3, -1), label 1, twice.
DATA = [([[1.0, 2.0]], [0]), ([[3.0, -1.0]] * 2, [1, 1])]
START = np.array([[0.3, -0.2], [0.1, 0.4]])
LR, STEPS = 0.5, 2
NAME = "classifier.weight"


def slope(client: int, w: Any) -> Any:
    """Return the gradient of a client's loss at `w`."""
    x, y = DATA[client]
    return descent(w, np.array(x[0]), y[0])[0]


def unit(vector: Any) -> Any:
    """Return `vector` with length 1; zero stays zero."""
    return vector / (np.linalg.norm(vector) + 1e-16)


def softmax(scores: Any) -> Any:
    """Return the softmax of `scores` (classes,)."""
    return np.exp(scores) / np.exp(scores).sum()


def local(w: Any, direction: Callable[[int, Any], Any], rate: Callable[[int], float] | None = None) -> Any:
    """Return the weights after the steps of a visit along ``-direction(step, w)``."""
    for step in range(STEPS):
        w = w - (rate(step) if rate else LR) * direction(step, w)
    return w


def played(name: str, rounds: int = 3, **own: Any) -> tuple[Any, dict[int, Any], list[Any]]:
    """Return the method, what clients keep, and the last uploads after `rounds` rounds of method `name`."""
    method, kept, uploads = play(name, two_layers(None, START.copy()), DATA, rounds=rounds, **own)
    return method, kept, [upload[NAME] for upload in uploads]


def near(found: Any, expected: Any) -> None:
    """Assert that two arrays agree to rounding."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
