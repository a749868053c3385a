"""Scores of a model on labelled examples, for server, clients and analyses, and the smoothed accuracy over rounds.

Importing this module does not import torch; the functions that need it import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Evaluations in the moving mean of the papers' smoothed accuracy.
WINDOW = 10


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1], mean cross-entropy in nats, and accuracy of each class (NaN without examples)."""

    accuracy: float
    loss: float
    per_class: tuple[float, ...]


def score(
    model: nn.Module,
    arrays: Mapping[str, npt.NDArray[Any]],
    inputs: Tensor,
    labels: Tensor,
    classes: int,
    batch: int = 1000,
) -> Score:
    """Return the score of a model with weights `arrays` on inputs (n, ...) and labels (n,), `batch` at a time.

    `model` is in evaluation mode; its weights are overwritten by `arrays` (every name of the ``state_dict``,
    of tied weights one).
    """
    import torch
    from torch.nn import functional

    given = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    if any(model.load_state_dict(given, strict=False)):  # tied weights come under one name; anything else is an error
        from fedcross.tasks.models.weights import load_arrays

        load_arrays(model, arrays)
    scores, truth = predictions(model, inputs, batch).float(), labels.cpu()
    right = hits(scores, truth)
    per_class_hits = np.bincount(truth.numpy(), weights=right, minlength=classes)
    counts = np.bincount(truth.numpy(), minlength=classes)
    per_class = np.divide(per_class_hits, counts, out=np.full(classes, np.nan), where=counts > 0)
    loss = functional.cross_entropy(scores, truth).item()
    return Score(float(right.mean()), loss, tuple(float(share) for share in per_class))


def accuracy(predict: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, batch: int = 1000) -> float:
    """Return the share of inputs (n, ...) whose largest class score in `predict` is that of labels (n,), in [0, 1]."""
    return float(hits(predictions(predict, inputs, batch), labels.cpu()).mean())


def predictions(predict: Callable[[Tensor], Tensor], inputs: Tensor, batch: int = 1000) -> Tensor:
    """Return the class scores (n, classes) of inputs (n, ...) on the CPU, computed `batch` at a time."""
    import torch

    with torch.no_grad():
        return torch.cat([predict(inputs[i : i + batch]).cpu() for i in range(0, len(inputs), batch)])


def hits(scores: Tensor, labels: Tensor) -> npt.NDArray[np.bool_]:
    """Return whether the largest of each row of `scores` (n, classes) is that of `labels` (n,); both on the CPU."""
    right: npt.NDArray[np.bool_] = (scores.argmax(1) == labels).numpy()
    return right


@dataclass(frozen=True)
class Smoothed:
    """Largest moving mean over `window` evaluations and the standard deviation of those evaluations, in [0, 1]."""

    mean: float
    std: float
    window: int


def smoothed(accuracies: npt.NDArray[np.float64], window: int = WINDOW) -> Smoothed:
    """Return the papers' smoothed accuracy: the maximum over time of a moving mean, and the spread inside that window.

    Parameters
    ----------
    accuracies : array of float, shape (evaluations,)
        Test accuracies in the order of the rounds, in [0, 1].
    window : int
        Evaluations per mean. A shorter curve is one window.

    Notes
    -----
    The logger in the public code of FedCross's laboratory does this, so the published values are most likely of this
    kind. The spread is the population standard deviation (divisor `window`); of equal means the earliest counts.

    Every evaluation counts. A run that was made longer keeps that of its former last round; where this is no multiple
    of ``evaluate_every``, windows with it reach over fewer rounds than those of a run that had the length at once.
    """
    if accuracies.size == 0:
        return Smoothed(math.nan, math.nan, 0)
    width = min(window, accuracies.size)
    windows = np.lib.stride_tricks.sliding_window_view(accuracies, width)
    best = windows[int(np.argmax(windows.mean(axis=1)))]
    return Smoothed(float(best.mean()), float(best.std()), width)
