"""How good a model is on labelled examples: the same on the server's test set and on a client's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.arrays import Arrays


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1], mean cross-entropy in nats, and accuracy of each class (NaN without examples)."""

    accuracy: float
    loss: float
    per_class: tuple[float, ...]


def load_weights(model: nn.Module, arrays: Arrays) -> None:
    """Copy `arrays` (every name of the state_dict) into `model`."""
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, batch: int = 1000) -> Score:
    """Return the score of `model` (in evaluation mode) on inputs (n, ...) and labels (n,), `batch` at a time."""
    logits = torch.cat([model(inputs[i : i + batch]).float().cpu() for i in range(0, len(inputs), batch)])
    truth = labels.cpu()
    right = (logits.argmax(1) == truth).numpy()
    hits = np.bincount(truth.numpy(), weights=right, minlength=classes)
    counts = np.bincount(truth.numpy(), minlength=classes)
    per_class = np.divide(hits, counts, out=np.full(classes, np.nan), where=counts > 0)
    loss = functional.cross_entropy(logits, truth).item()
    return Score(float(right.mean()), loss, tuple(float(share) for share in per_class))
