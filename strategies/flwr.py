"""Flower strategies as methods: the strategy configures and aggregates, fedcross does everything else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.fedopt import FedOpt
from pydantic import Field
from torch import Tensor

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.randomness import global_generators
from fedcross.strategies.method import Arrays, Round, Settings, Start, Task, Upload
from fedcross.strategies.objective import Objective, Prepared, Visit, flatten
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.foreign import Foreign, built
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.wire.records import encode

#: A step of theirs could make a running variance negative.
OPTIMISERS = (flower.FedAvgM, FedOpt)


class FlwrParams(Settings):
    name: str = "FedAdam"
    strategy: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class FlowerClient(Objective[FlwrParams]):
    """Cross-entropy and ``mu/2 |w - G|^2`` over the parameters, if the strategy sends ``proximal-mu``."""

    def prepare(self, visit: Visit) -> Prepared:
        mu, start = float(visit.config.get("proximal-mu", 0.0)), flatten(visit.params)
        return {"mu": start.new_tensor(mu), "start": start} if mu else {}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        return prepared["mu"] * (flat - prepared["start"]) if prepared else None


@dataclass
class FlwrState(ModelState):
    """The global model, the strategy, and the names of the entries that it gets."""

    foreign: Foreign
    handed: list[str]

    def record(self, arrays: Arrays) -> ArrayRecord:
        """Return the entries of a model that the strategy gets."""
        return encode({name: arrays[name] for name in self.handed})

    def arrays(self, record: ArrayRecord) -> Arrays:
        """Return the strategy's arrays in the dtypes of the model; a FederationError if they are not what it got."""
        arrays = {str(name): np.asarray(array.numpy()) for name, array in record.items()}
        if {n: a.shape for n, a in arrays.items()} != {n: self.model[n].shape for n in self.handed}:
            raise FederationError("method=flwr: the strategy gives arrays of other names or shapes than it got.")
        return {name: arrays[name].astype(self.model[name].dtype) for name in self.handed}


class Flwr(SingleModel[FlwrParams, FlwrState]):
    """Any strategy of Flower's Message API: a short name in ``method.name``, or an import path in ``method.strategy``.

    A round calls the strategy's ``configure_train``, which sees only the drawn clients (node id: partition id + 1), and
    its ``aggregate_train`` with the accepted uploads as replies. State: the global model, the strategy's attributes.

    Deviations from Flower: integer entries are averaged by examples. Strategies with an optimiser, or with differential
    privacy, get parameters only. Dtypes stay those of the model. Global random generators are keyed by the run's seed
    and the round. Clients do not clip. Where a strategy declines to aggregate the model stays (``flower_skipped`` 1).
    """

    Objective = FlowerClient

    def init(self, start: Start) -> FlwrState:
        path, given = self.params.strategy or self.params.name, {**self.params.options, **self.params.arguments}
        foreign = Foreign(built(path, given, start.clients_per_round))
        if lost := foreign.state()["lost"]:
            log(logging.WARNING, "fedcross: %s keeps %s: this run cannot be resumed.", path, lost[0])
        private = any(type(one).__name__.startswith("DifferentialPrivacy") for one in foreign.chain)
        floats = [name for name, array in start.arrays.items() if array.dtype.kind == "f"]
        if private and (others := [name for name in floats if name not in start.parameters]):
            raise ConfigError(f"method=flwr: {others[0]} is not trained, and noise could make it useless.")
        only = private or any(isinstance(one, OPTIMISERS) for one in foreign.chain)
        handed = [name for name in floats if not only or name in start.parameters]
        return FlwrState({name: array.copy() for name, array in start.arrays.items()}, foreign, handed)

    def dispatch(self, state: FlwrState, round: Round) -> list[Task]:
        nodes, sent = [client + 1 for client in round.clients], state.record(state.model)
        grid: Any = SimpleNamespace(get_node_ids=lambda: nodes)  # all that the strategy sees of it
        with _surroundings(round, "flower configure"):
            made = list(state.foreign.chain[0].configure_train(round.number, sent, ConfigRecord(), grid))
        contents = {message.metadata.dst_node_id: message.content for message in made}
        if len(contents) < len(made) or not set(contents) <= set(nodes):
            raise FederationError("method=flwr: the strategy made a message for a node that was not drawn, or two.")
        records = {node: next(iter(content.array_records.values()), sent) for node, content in contents.items()}
        distinct = {id(record): record for record in records.values()}  # clients that get the same share a model
        models = {number: state.model | state.arrays(record) for number, record in distinct.items()}
        slots = [(slot, node) for slot, node in enumerate(nodes) if node in contents]
        return [
            Task(node - 1, slot, models[id(records[node])], config=_scalars(contents[node])) for slot, node in slots
        ]

    def aggregate(self, state: FlwrState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        if not uploads:
            return {}
        replies = [_reply(state, upload) for upload in uploads]
        with _surroundings(round, "flower aggregate"):
            arrays, metrics = state.foreign.chain[0].aggregate_train(round.number, replies)
        if arrays is None:
            return {"flower_skipped": 1.0}
        rest = [{n: u.arrays[n] for n in state.model if n not in state.handed} for u in uploads]
        made = weighted_mean(rest, [float(u.num_examples) for u in uploads]) | state.arrays(arrays)
        state.model = {name: made[name] for name in state.model}
        told = {name for reply in replies for name in reply.content.metric_records["metrics"]}
        own = {name: value for name, value in (metrics or {}).items() if name not in told}
        return {f"flower_{name}": float(value) for name, value in own.items() if isinstance(value, int | float)}


def _scalars(content: RecordDict) -> dict[str, int | float | str | bool]:
    """Return the configuration in a message of the strategy, as far as a request can carry it."""
    items = [item for record in content.config_records.values() for item in record.items()]
    return {name: value for name, value in items if isinstance(value, int | float | str | bool)}


def _reply(state: FlwrState, upload: Upload) -> Message:
    """Return `upload` as a reply that Flower's strategies read."""
    metrics: dict[str, Any] = {**upload.metrics, "num-examples": upload.num_examples}
    metrics |= {"train_loss": metrics["train-loss"]} if "train-loss" in metrics else {}  # Flower's spelling
    content = RecordDict({"arrays": state.record(upload.arrays), "metrics": MetricRecord(metrics)})
    asked = Message(RecordDict(), dst_node_id=upload.client + 1, message_type=MessageType.TRAIN)
    return Message(content, reply_to=asked)


@contextmanager
def _surroundings(round: Round, purpose: str) -> Iterator[None]:
    """Seed the global random generators for a strategy, hide its log below warnings, name its errors."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with global_generators(round.seed, purpose, round.number):
            yield
    except Exception as error:
        raise FederationError(f"method=flwr: {type(error).__name__} in the strategy: {error}") from error
    finally:
        logger.setLevel(level)
