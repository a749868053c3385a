"""Evaluation of the global model: on the central test set, and on the clients' own test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from safetensors.numpy import save
from torch import Tensor, nn

from fedcross.client.device import evaluation_batch
from fedcross.core.files import write_atomically
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.nodes import forget, receive
from fedcross.strategies.wire.records import encode
from fedcross.tasks.data import FederatedData
from fedcross.tasks.models.weights import every_name, load_arrays
from fedcross.tasks.models.width import FULL, Width
from fedcross.tasks.scoring import Score, predictions, score, spread
from fedcross.tasks.scoring import scores as metrics_of


class Evaluator:
    """Evaluates models on the central test set of `data`, which is prepared once and stays on `device`.

    `model` is the network, whose weights are overwritten; `batch` the examples per forward pass (default: as the device
    allows); `build` makes the network of a width, where models have several.
    """

    def __init__(
        self,
        model: nn.Module,
        data: FederatedData,
        device: torch.device,
        batch: int | None = None,
        build: Callable[[Width], nn.Module] | None = None,
    ) -> None:
        self.model = model.to(device).eval()
        self._data, self.device, self._build = data, device, build
        self.batch = batch or evaluation_batch(device, prod(data.task.shape))
        self._parts: dict[bool, tuple[Tensor, Tensor]] = {}
        self._slices: dict[Width, nn.Module] = {}

    def evaluate(self, driver: Driver) -> tuple[Score | None, dict[str, Any]]:
        """Return the score of the run's global model, and further columns of its line of metrics.

        ``validation_accuracy`` is that of the task's validation part, if it has one. Where models have several widths,
        ``width_accuracy`` has the accuracy of each.
        """
        found = driver.evaluation()
        models = list(found.widths.items()) or [(FULL, arrays) for arrays in found.models]
        scores = [self.score(arrays, size) for size, arrays in models]
        chosen = mean_score(scores[:1] if found.widths else scores)
        columns: dict[str, Any] = {}
        if models and self._data.task.validation is not None:
            held = [self.score(arrays, size, held_out=True) for size, arrays in models]
            judged = mean_score(held[:1] if found.widths else held)
            columns["validation_accuracy"] = judged.accuracy if judged else None
        if found.widths:
            columns["width_accuracy"] = {size.text: score.accuracy for (size, _), score in zip(models, scores)}
        return chosen, columns

    def further(self, driver: Driver) -> dict[str, float]:
        """Return metrics beside the accuracy of the model to deploy (:func:`tasks.scoring.scores`)."""
        found = driver.evaluation()
        if not (found.models or found.widths):
            return {}
        size, arrays = next(iter(found.widths.items())) if found.widths else (FULL, driver.global_model())
        inputs, labels = self._part(held_out=False)
        model = self.network(size)
        load_arrays(model, arrays)
        return metrics_of(predictions(model, inputs, self.batch).float(), labels.cpu())

    def network(self, size: Width) -> nn.Module:
        """Return the network for models of `size`."""
        if self._build is None or size.ratio >= 1:
            return self.model
        if size not in self._slices:
            self._slices[size] = self._build(size).to(self.device).eval()
        return self._slices[size]

    def score(self, arrays: Arrays, size: Width = FULL, *, held_out: bool = False) -> Score:
        """Return the score of the model of `size` with weights `arrays` on the test set, or the validation part."""
        inputs, labels = self._part(held_out=held_out)
        return score(self.network(size), arrays, inputs, labels, self._data.task.classes, self.batch)

    def _part(self, *, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return inputs, on the device, and labels of the test set or the validation part."""
        if held_out not in self._parts:
            held = self._data.validation if held_out else None
            labels = torch.from_numpy(np.array(self._data.task.test.y))  # a copy: the cache is read-only
            inputs, labels = held or (self._data.central, labels)
            self._parts[held_out] = inputs.to(self.device), labels
        return self._parts[held_out]


def write_model(path: Path, arrays: Arrays, tied: Mapping[str, str]) -> None:
    """Write a model as a safetensors file; `tied` maps further names of tied weights to the name of the array."""
    complete = {name: np.asarray(array, order="C") for name, array in every_name(arrays, tied).items()}
    write_atomically(path, save(complete))


def across_clients(driver: Driver, grid: Grid, number: int) -> dict[str, Any]:
    """Ask every connected client for the accuracy of the global model on its own test part (federated evaluation).

    Where models have several widths, a client gets the largest that its device can hold. Returns ``client_accuracy``
    (partition id -> accuracy), and over the clients that answered ``client_accuracy_mean``, ``..._worst_tenth`` and
    ``..._std``; an empty dict if none did.
    """
    evaluated = driver.evaluation()
    coded = {s: encode(a) for s, a in (evaluated.clients or evaluated.widths or {FULL: driver.global_model()}).items()}
    asked, messages = list[int](), []
    driver.nodes.refresh(grid)
    for partition, node in driver.nodes.online.items():
        held = driver.nodes.budget(partition)
        size = next((size for size in coded if not driver.ledger.widths or holds(held, size)), None)
        if size is None:
            continue
        config = ConfigRecord({"client": partition, "round": number, **described(size)})
        content = RecordDict({"arrays": coded[size], "config": config})
        messages.append(Message(content, dst_node_id=node, message_type=MessageType.EVALUATE))
        asked.append(partition)
    ids = list(grid.push_messages(messages))
    owner = dict(zip(ids, asked))
    found: dict[int, float] = {}
    for reply in receive(grid, ids, driver.settings.deadline_s):
        if reply.has_content() and "metrics" in reply.content.metric_records:
            accuracy = reply.content.metric_records["metrics"].get("accuracy")
            if isinstance(accuracy, float) and 0.0 <= accuracy <= 1.0:
                found[owner[reply.metadata.reply_to_message_id]] = accuracy
    forget(grid, ids)
    if not found:
        return {}
    values, named = list(found.values()), {str(partition): found[partition] for partition in sorted(found)}
    mean = float(np.mean(values))
    return {"client_accuracy": named, "client_accuracy_mean": mean, **spread(values, "client_accuracy")}


def mean_score(scores: Sequence[Score]) -> Score | None:
    """Return the uniform mean of `scores` on one test set, entry by entry; None if there are none."""
    if len(scores) < 2:
        return scores[0] if scores else None
    accuracy, loss = (float(np.mean([getattr(score, name) for score in scores])) for name in ("accuracy", "loss"))
    return Score(accuracy, loss, tuple(np.mean([score.per_class for score in scores], axis=0).tolist()))
