"""Flower strategies as methods: the strategy configures and aggregates, fedcross does everything else."""

from __future__ import annotations

import importlib
import inspect
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.fedopt import FedOpt
from pydantic import Field
from torch import Tensor

from fedcross.core.errors import ConfigError, FederationError, StorageError, nearest
from fedcross.core.randomness import key
from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import Objective, Prepared, Visit, flatten
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.wire.records import Arrays, encode

MU = "proximal-mu"  # Flower's own name for it in the configuration that clients get
#: Attributes that decide how many clients a strategy draws and waits for; set so that it takes all drawn clients.
DRAWING = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}
SAMPLED = "num_sampled_clients"  # of wrappers for differential privacy: how many clients a round has
NEITHER = (Strategy, flower.FedXgbBagging, flower.FedXgbCyclic)  # no strategies for networks
RECORD = "record"  # marks the arrays of an ArrayRecord in a checkpoint
OPTIMISERS = (flower.FedAvgM, FedOpt)  # a step of theirs could make a running variance negative


class FlwrParams(Settings):
    """``name``: short name of a strategy of ``flwr.serverapp.strategy``, or ``strategy``: ``package.module:Class``.

    ``arguments`` are those of its constructor; one that is itself a strategy is given as a name or path, or as
    ``{strategy: PATH, arguments: {...}}``. ``options`` is their older name.
    """

    name: str = "FedAdam"
    strategy: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class FlowerClient(Objective[FlwrParams]):
    """Cross-entropy and ``mu/2 |w - G|^2`` over the parameters, if the strategy sends ``proximal-mu``."""

    def prepare(self, visit: Visit) -> Prepared:
        """Return mu and the received parameters."""
        mu, start = float(visit.config.get(MU, 0.0)), flatten(visit.params)
        return {"mu": start.new_tensor(mu), "start": start} if mu else {}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``mu (w - G)``."""
        return prepared["mu"] * (flat - prepared["start"]) if prepared else None


class Foreign:
    """A Flower strategy and those inside it, outermost first; a checkpoint holds their arrays, numbers and texts."""

    def __init__(self, strategy: Strategy) -> None:
        self.chain: list[Any] = [strategy]
        for outer in self.chain:
            self.chain += [one for one in vars(outer).values() if isinstance(one, Strategy) and one not in self.chain]

    def state(self) -> dict[str, Any]:
        """Return the attributes by level and name, and as ``lost`` the names of those that a checkpoint cannot hold."""
        found: dict[str, Any] = {"lost": []}
        for level, name, value in ((i, *item) for i, one in enumerate(self.chain) for item in vars(one).items()):
            if isinstance(value, ArrayRecord):
                found[f"{level}-{name}"] = {RECORD: {str(n): array.numpy() for n, array in value.items()}}
            elif _storable(value):
                found[f"{level}-{name}"] = value
            elif not (callable(value) or isinstance(value, Strategy)):
                found["lost"].append(name)
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` returned; a StorageError if it is not the whole state."""
        if state["lost"]:
            raise StorageError(f"the strategy keeps {', '.join(state['lost'])}, which no checkpoint holds.")
        for place, value in ((place.split("-"), value) for place, value in state.items() if place != "lost"):
            record = isinstance(value, dict) and set(value) == {RECORD}
            setattr(self.chain[int(place[0])], place[1], encode(value[RECORD]) if record else value)


@dataclass
class FlwrState(ModelState):
    """The global model, the strategy, and the names of the entries that it gets."""

    foreign: Foreign
    handed: list[str]


class Flwr(SingleModel[FlwrParams, FlwrState]):
    """Any strategy of Flower's Message API: a short name in ``method.name``, or an import path in ``method.strategy``.

    A round calls the strategy's ``configure_train``, which sees only the drawn clients (node id: partition id + 1), and
    its ``aggregate_train`` with the accepted uploads as replies. State: the global model, the strategy's attributes.

    Deviations from Flower: integer entries are averaged by examples. Strategies with an optimiser, or with differential
    privacy, get parameters only. Dtypes stay those of the model. The global random generators are keyed by the run's
    seed and the round. If a strategy declines to aggregate, the model stays and ``flower_skipped`` is 1. Clients do not
    clip their updates.
    """

    Objective = FlowerClient

    def init(self, start: Start) -> FlwrState:
        """Keep the model and create the strategy."""
        path = self.params.strategy or self.params.name
        foreign = Foreign(_built(path, {**self.params.options, **self.params.arguments}, start.clients_per_round))
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
        """Send the arrays and configuration of the strategy's messages to the drawn clients, all that it sees."""
        nodes = [client + 1 for client in round.clients]
        grid, sent = cast("Grid", SimpleNamespace(get_node_ids=lambda: nodes)), _encoded(state, state.model)
        with _surroundings(round, "flower configure"):
            made = list(state.foreign.chain[0].configure_train(round.number, sent, ConfigRecord(), grid))
        messages = {message.metadata.dst_node_id: message.content for message in made}
        if len(messages) < len(made) or not set(messages) <= set(nodes):
            raise FederationError("method=flwr: the strategy made a message for a node that was not drawn, or two.")
        models, tasks = dict[int, Arrays](), []
        for slot, client in enumerate(round.clients):
            if (content := messages.get(client + 1)) is not None:
                record = next(iter(content.array_records.values()), sent)
                if id(record) not in models:  # one for each record, so that clients that get the same share it
                    models[id(record)] = state.model | _decoded(state, record)
                configs = [item for one in content.config_records.values() for item in one.items()]
                config = {name: value for name, value in configs if isinstance(value, int | float | str | bool)}
                tasks.append(Task(client, slot, models[id(record)], config=config))
        return tasks

    def aggregate(self, state: FlwrState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Let the strategy compute the new global model."""
        if not uploads:
            return {}
        replies = [_reply(state, upload) for upload in uploads]
        with _surroundings(round, "flower aggregate"):
            arrays, metrics = state.foreign.chain[0].aggregate_train(round.number, replies)
        if arrays is None:
            return {"flower_skipped": 1.0}
        rest = [{n: u.arrays[n] for n in state.model if n not in state.handed} for u in uploads]
        made = weighted_mean(rest, [float(u.num_examples) for u in uploads]) | _decoded(state, arrays)
        state.model = {name: made[name] for name in state.model}
        told = {name for reply in replies for name in reply.content.metric_records["metrics"]}
        own = {name: value for name, value in (metrics or {}).items() if name not in told}
        return {f"flower_{name}": float(value) for name, value in own.items() if isinstance(value, int | float)}


def _built(path: str, arguments: Mapping[str, Any], clients: int) -> Strategy:
    """Return the strategy at `path` with its `arguments`, ready for rounds of `clients` clients."""
    given = dict(arguments)
    for name, value in arguments.items():
        inner: Any = {"strategy": value} if name == "strategy" and isinstance(value, str) else value
        if isinstance(inner, Mapping) and "strategy" in inner:
            given[name] = _built(str(inner["strategy"]), inner.get("arguments") or {}, clients)
    dotted = path if "." in path or ":" in path else f"{flower.__name__}.{path}"
    module, _, attribute = dotted.rpartition(":" if ":" in dotted else ".")
    try:
        kind: Any = getattr(importlib.import_module(module), attribute, None)
        if not (isinstance(kind, type) and issubclass(kind, Strategy)) or kind in NEITHER:
            raise ConfigError(f"method: {path}: no strategy of Flower's Message API. {nearest(path, flower.__all__)}")
        takes = {name for one in kind.__mro__[:-1] for name in inspect.signature(one).parameters}
        if wrong := [name for name in given if name in DRAWING or name not in takes]:
            raise ConfigError(f"method: {path} has no argument {wrong[0]!r} here. Known: {', '.join(sorted(takes))}.")
        built: Strategy = kind(**({SAMPLED: clients} if SAMPLED in takes else {}) | given)
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"method: {path}: {type(error).__name__}: {error}") from error
    vars(built).update({name: value for name, value in DRAWING.items() if name in vars(built)})
    return built


def _storable(value: Any) -> bool:
    """Return whether a checkpoint holds `value`: arrays, numbers, texts, and lists and dicts of these."""
    if isinstance(value, list | tuple | dict):
        return all(map(_storable, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic)


def _decoded(state: FlwrState, record: ArrayRecord) -> Arrays:
    """Return the strategy's arrays in the dtypes of the model, if they are those that it was handed."""
    arrays = {str(name): np.asarray(array.numpy()) for name, array in record.items()}
    if {n: a.shape for n, a in arrays.items()} != {n: state.model[n].shape for n in state.handed}:
        raise FederationError("method=flwr: the strategy gives arrays of other names or shapes than it got.")
    return {name: arrays[name].astype(state.model[name].dtype) for name in state.handed}


def _reply(state: FlwrState, upload: Upload) -> Message:
    """Return `upload` as a reply that Flower's strategies read."""
    metrics: dict[str, Any] = {**upload.metrics, "num-examples": upload.num_examples}
    metrics |= {"train_loss": metrics["train-loss"]} if "train-loss" in metrics else {}  # Flower's spelling
    content = RecordDict({"arrays": _encoded(state, upload.arrays), "metrics": MetricRecord(metrics)})
    asked = Message(RecordDict(), dst_node_id=upload.client + 1, message_type=MessageType.TRAIN)
    return Message(content, reply_to=asked)


def _encoded(state: FlwrState, arrays: Arrays) -> ArrayRecord:
    return encode({name: arrays[name] for name in state.handed})


@contextmanager
def _surroundings(round: Round, purpose: str) -> Iterator[None]:
    """Seed the global random generators for a strategy, restore them, hide its log below warnings, name its errors."""
    drawn, logger = key(round.seed, purpose, round.number), logging.getLogger("flwr")
    before, numpys, level = random.getstate(), np.random.get_state(), logger.level  # noqa: NPY002 - Flower's own
    try:
        logger.setLevel(logging.WARNING)
        random.seed(drawn)
        np.random.seed(drawn % 2**32)  # noqa: NPY002
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(drawn)
            yield
    except Exception as error:
        raise FederationError(f"method=flwr: {type(error).__name__} in the strategy: {error}") from error
    finally:
        random.setstate(before)
        np.random.set_state(numpys)  # noqa: NPY002
        logger.setLevel(level)
