"""The global model on the central test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from client.data import FederatedData
from strategies.wire import Arrays


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1], mean cross-entropy in nats, and accuracy of each class (NaN without examples)."""

    accuracy: float
    loss: float
    per_class: tuple[float, ...]


class Evaluator:
    """Evaluates models on a task's test set, in large batches on one device.

    Parameters
    ----------
    model : nn.Module
        The network; its weights are overwritten.
    data : FederatedData
        The central test set is prepared once and stays on `device`.
    device : torch.device
        Where to evaluate.
    batch : int
        Examples at a time.
    """

    def __init__(self, model: nn.Module, data: FederatedData, device: torch.device, batch: int = 1000) -> None:
        self.model = model.to(device).eval()
        self.task = data.task
        self._data = data
        self.device = device
        self.batch = batch
        self._inputs: Tensor | None = None

    def score(self, arrays: Arrays) -> Score:
        """Return the score of the model with weights `arrays`."""
        self.model.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in arrays.items()})
        if self._inputs is None:
            self._inputs = self._data.central.to(self.device)
        labels = torch.from_numpy(np.asarray(self.task.test.y))
        logits = self._logits(self._inputs)
        right = (logits.argmax(1) == labels).numpy()
        hits = np.bincount(labels.numpy(), weights=right, minlength=self.task.classes)
        counts = np.bincount(labels.numpy(), minlength=self.task.classes)
        per_class = np.divide(hits, counts, out=np.full(self.task.classes, np.nan), where=counts > 0)
        loss = functional.cross_entropy(logits, labels).item()
        return Score(float(right.mean()), loss, tuple(float(share) for share in per_class))

    @torch.no_grad()
    def _logits(self, inputs: Tensor) -> Tensor:
        pieces = [self.model(inputs[i : i + self.batch]).float().cpu() for i in range(0, len(inputs), self.batch)]
        return torch.cat(pieces)


def mean_score(scores: Sequence[Score]) -> Score | None:
    """Return the uniform mean of `scores`, entry by entry; None if there are none.

    For methods without one global model. All scores are of the same test set, so each class is NaN in all or in none.
    """
    if not scores:
        return None
    if len(scores) == 1:
        return scores[0]
    per_class = np.mean([score.per_class for score in scores], axis=0)
    return Score(
        float(np.mean([score.accuracy for score in scores])),
        float(np.mean([score.loss for score in scores])),
        tuple(float(share) for share in per_class),
    )
