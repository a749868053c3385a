"""Scores of a model on labelled examples, for server, clients and analyses, and the smoothed accuracy over rounds.

Importing this module does not import torch; the functions that need it import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    """Accuracy in [0, 1], mean cross-entropy in nats, accuracy of each class (NaN without examples)."""

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
    from torch.nn import functional

    from fedcross.tasks.models.weights import load_arrays

    load_arrays(model, arrays)
    logits, truth = predictions(model, inputs, batch).float(), labels.cpu()
    right = hits(logits, truth)
    found, counts = (np.bincount(truth.numpy(), weights=weight, minlength=classes) for weight in (right, None))
    per_class = np.divide(found, counts, out=np.full(classes, np.nan), where=counts > 0)
    loss = functional.cross_entropy(logits, truth).item()
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


def spread(accuracies: Sequence[float], name: str) -> dict[str, float]:
    """Return the worst tenth and the standard deviation of clients' accuracies, as ``NAME_worst_tenth``, ``NAME_std``.

    The worst tenth is the mean over the tenth of the clients with the lowest accuracies, at least one.
    """
    worst = sorted(accuracies)[: max(1, len(accuracies) // 10)]
    return {f"{name}_worst_tenth": float(np.mean(worst)), f"{name}_std": float(np.std(accuracies))}


def scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return further metrics of class scores (n, classes) on labels (n,), both on the CPU, each in [0, 1].

    ``balanced_accuracy`` is the mean recall and ``auc`` the mean one-against-rest area under the ROC curve, over the
    classes that occur; ``majority_share`` is the accuracy of always naming the most frequent class. With two classes
    ``auc``, ``sensitivity`` and ``specificity`` take class 1 as positive.
    """
    chances, named, truth = logits.softmax(1).numpy(), logits.argmax(1).numpy(), labels.numpy()
    classes, counts = np.unique(truth, return_counts=True)
    recall = [float((named[truth == one] == one).mean()) for one in classes]
    found = {"majority_share": float(counts.max() / len(truth)), "balanced_accuracy": float(np.mean(recall))}
    if len(classes) == 1:
        return found
    if logits.shape[1] == 2:
        found |= {"sensitivity": recall[1], "specificity": recall[0]}
        classes = classes[1:]
    return found | {"auc": float(np.mean([_area(chances[:, one], truth == one) for one in classes]))}


def _area(chance: npt.NDArray[np.floating[Any]], positive: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: the share of pairs in the right order, ties counted half."""
    from scipy.stats import rankdata

    ranks = rankdata(chance)
    hits, n = positive.sum(), len(positive)
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * (n - hits)))


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
