"""Evaluation of the global model: on the central test set, and on the clients' own test data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedcross.client.device import evaluation_batch
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.exchange import forget, receive
from fedcross.strategies.wire.records import encode
from fedcross.tasks.data import FederatedData
from fedcross.tasks.models.slicing import FULL, Plan, Size, cut
from fedcross.tasks.scoring import Score, score


class Evaluator:
    """Evaluates models on a task's test set, in large batches on one device.

    Parameters
    ----------
    model : nn.Module
        The network; the evaluator overwrites its weights.
    data : FederatedData
        The central test set is prepared once and stays on `device`.
    device : torch.device
        Where to evaluate.
    batch : int, optional
        Examples per forward pass; by default as many as the device takes.
    """

    def __init__(self, model: nn.Module, data: FederatedData, device: torch.device, batch: int | None = None) -> None:
        self.model = model.to(device).eval()
        self._data = data
        self.device = device
        self.batch = batch or evaluation_batch(device, prod(data.task.shape))
        self._inputs: Tensor | None = None
        #: How the model is sliced; None if all models are full ones.
        self.plan: Plan | None = None
        self._slices: dict[Size, nn.Module] = {}

    def network(self, size: Size) -> nn.Module:
        """Return the network for models of `size`."""
        if self.plan is None or size.width >= 1:
            return self.model
        if size not in self._slices:
            self._slices[size] = cut(self.model, self.plan, size).eval()
        return self._slices[size]

    def score(self, arrays: Arrays, size: Size = FULL) -> Score:
        """Return the score of the model of `size` with weights `arrays`."""
        if self._inputs is None:
            self._inputs = self._data.central.to(self.device)
        labels = torch.from_numpy(np.array(self._data.task.test.y))  # a copy: the cache is read-only
        return score(self.network(size), arrays, self._inputs, labels, self._data.task.classes, self.batch)

    def score_of(self, models: Sequence[Arrays]) -> Score | None:
        """Return the mean score of `models`, as :func:`mean_score` takes it."""
        return mean_score([self.score(arrays) for arrays in models])


def across_clients(method: Method, grid: Grid, number: int) -> dict[str, Any]:
    """Ask every connected client for the accuracy of the global model on its own test part (federated evaluation).

    Where models have several sizes, a client gets the largest that its device can hold.

    Returns
    -------
    dict
        ``client_accuracy`` (partition id -> accuracy), its uniform mean ``client_accuracy_mean`` and standard deviation
        ``client_accuracy_std`` over the clients that answered; empty if none has test examples.
    """
    models = method.client_models() or {FULL: method.evaluation_arrays()}
    coded = {size: encode(arrays) for size, arrays in models.items()}
    asked: dict[int, int] = {}
    messages = []
    method.nodes.refresh(grid)
    for partition, node in method.nodes.online.items():
        size = next((size for size in models if method.plan is None or holds(method.budget(partition), size)), None)
        if size is None:
            continue
        config = ConfigRecord({"client": partition, "round": number, **described(size)})
        content = RecordDict({"arrays": coded[size], "config": config})
        messages.append(Message(content, dst_node_id=node, message_type=MessageType.EVALUATE))
        asked[len(asked)] = partition
    ids = list(grid.push_messages(messages))
    owner = {message_id: asked[i] for i, message_id in enumerate(ids)}
    found: dict[int, float] = {}
    for reply in receive(grid, ids, method.federation.deadline_s):
        if reply.metadata.reply_to_message_id not in owner:
            method.stray(reply)  # of a visit that is under way
        elif reply.has_content() and "metrics" in reply.content.metric_records:
            accuracy = reply.content.metric_records["metrics"].get("accuracy")
            if isinstance(accuracy, float) and 0.0 <= accuracy <= 1.0:
                found[owner[reply.metadata.reply_to_message_id]] = accuracy
    forget(grid, ids)
    if not found:
        return {}
    values = list(found.values())
    return {
        "client_accuracy": {str(partition): found[partition] for partition in sorted(found)},
        "client_accuracy_mean": float(np.mean(values)),
        "client_accuracy_std": float(np.std(values)),
    }


def mean_score(scores: Sequence[Score]) -> Score | None:
    """Return the uniform mean of `scores`, entry by entry; None if there are none.

    For methods without one global model. All scores come from the same test set, so a class is NaN in all or in none.
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
