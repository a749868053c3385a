"""The file of a final model, and its accuracy on the clients' own test data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from safetensors.numpy import save

from fedcross.core.files import write_atomically
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.nodes import forget, receive
from fedcross.strategies.wire.records import encode
from fedcross.tasks.accuracies import spread
from fedcross.tasks.models.weights import every_name
from fedcross.tasks.models.width import FULL


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
