"""Scores of models on labelled examples, for server, clients and analyses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcross.core.errors import DataError
from fedcross.tasks.data import FederatedData
from fedcross.tasks.models.weights import Arrays, tied
from fedcross.tasks.models.width import FULL, Width


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1], mean cross-entropy in nats, accuracy of each class (NaN without examples)."""

    accuracy: float
    loss: float
    per_class: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """The models to evaluate.

    The mean score of `models` on the test set is the round's score; without any the round has none. `widths` has the
    global model of every width, the widest first, where a method has several: the widest one's score is the round's.
    `clients` are the same as weights of the networks that clients train, if those compute something else (HeteroFL).
    `rounds` are the models of the round itself where `models` has their average over rounds.
    """

    models: list[Arrays]
    widths: dict[Width, Arrays] = field(default_factory=dict)
    clients: dict[Width, Arrays] | None = None
    rounds: list[Arrays] = field(default_factory=list)


class Evaluator:
    """Scores models on the central test set of `data`, which is prepared once and stays on `device`.

    Their networks, one for each width, come from `build`, and their weights are overwritten by those of each model.
    `batch` is the number of examples of a forward pass.
    """

    def __init__(
        self, build: Callable[[Width], nn.Module], data: FederatedData, device: torch.device, batch: int = 1000
    ) -> None:
        if not len(data.task.test):
            raise DataError(f"task {data.task.name}: no test examples. Add some, or raise task.test_fraction.")
        self._build, self._data, self.device, self.batch = build, data, device, batch
        self._parts: dict[bool, tuple[Tensor, Tensor]] = {}
        self._networks: dict[Width, nn.Module] = {}
        self._names: dict[Width, list[str]] = {}  # of each network's tensors, of tied ones the first

    def evaluate(self, found: Evaluation) -> tuple[Score | None, dict[str, Any]]:
        """Return the score of a round, and further columns of its line of metrics.

        ``validation_accuracy`` is that of the task's validation part, if it has one. Where models have several widths,
        ``width_accuracy`` has the accuracy of each. ``round_accuracy`` is that of the round's models where an average
        of them over rounds is evaluated.
        """
        sized = list(found.widths.items()) or [(FULL, arrays) for arrays in found.models]
        counted = slice(1 if found.widths else None)
        scores = [self.score(arrays, size) for size, arrays in sized]
        columns: dict[str, Any] = {}
        if sized and self._data.task.validation is not None:
            held = mean_score([self.score(arrays, size, held_out=True) for size, arrays in sized[counted]])
            columns["validation_accuracy"] = held.accuracy if held else None
        if found.widths:
            columns["width_accuracy"] = {size.text: score.accuracy for (size, _), score in zip(sized, scores)}
        if own := mean_score([self.score(arrays) for arrays in found.rounds]):
            columns["round_accuracy"] = own.accuracy
        return mean_score(scores[counted]), columns

    def score(self, arrays: Arrays, size: Width = FULL, *, held_out: bool = False) -> Score:
        """Return the score of the model of `size` with weights `arrays` on the test set, or the validation part."""
        return score(self.load(arrays, size), *self._part(held_out=held_out), self._data.task.classes, self.batch)

    def metrics(self, arrays: Arrays, size: Width = FULL) -> dict[str, float]:
        """Return metrics beside the accuracy on the test set (:func:`scores`)."""
        inputs, labels = self._part(held_out=False)
        return scores(predictions(self.load(arrays, size), inputs, self.batch).float(), labels.cpu())

    def network(self, size: Width = FULL) -> nn.Module:
        """Return the network for models of `size`, in evaluation mode; built once."""
        if size not in self._networks:
            self._networks[size] = network = self._build(size).to(self.device).eval()
            again = tied(network)
            self._names[size] = [name for name in network.state_dict() if name not in again]
        return self._networks[size]

    def load(self, arrays: Arrays, size: Width = FULL) -> nn.Module:
        """Return the network of `size` with weights `arrays`; a tied tensor has its first name."""
        network = self.network(size)
        # copies: torch cannot read a read-only view
        network.load_state_dict({n: torch.from_numpy(np.array(arrays[n])) for n in self._names[size]}, strict=False)
        return network

    def _part(self, *, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return inputs, on the device, and labels of the test set or the validation part."""
        if held_out not in self._parts:
            held = self._data.validation if held_out else None
            labels = torch.from_numpy(np.array(self._data.task.test.y))  # a copy: the cache is read-only
            inputs, labels = held or (self._data.central, labels)
            self._parts[held_out] = inputs.to(self.device), labels
        return self._parts[held_out]


def mean_score(scores: Sequence[Score]) -> Score | None:
    """Return the uniform mean of `scores` on one test set, entry by entry; None if there are none."""
    if len(scores) < 2:
        return scores[0] if scores else None
    accuracy, loss = (float(np.mean([getattr(score, name) for score in scores])) for name in ("accuracy", "loss"))
    return Score(accuracy, loss, tuple(np.mean([score.per_class for score in scores], axis=0).tolist()))


def score(
    predict: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, classes: int, batch: int = 1000
) -> Score:
    """Return the score of the class scores in `predict` on inputs (n, ...) and labels (n,), `batch` at a time."""
    logits, truth = predictions(predict, inputs, batch).float(), labels.cpu()
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
    with torch.no_grad():
        return torch.cat([predict(inputs[i : i + batch]).cpu() for i in range(0, len(inputs), batch)])


def hits(scores: Tensor, labels: Tensor) -> npt.NDArray[np.bool_]:
    """Return whether the largest of each row of `scores` (n, classes) is that of `labels` (n,); both on the CPU."""
    right: npt.NDArray[np.bool_] = (scores.argmax(1) == labels).numpy()
    return right


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
