"""A client's work in one process: everything that stays warm between messages, and the visit itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor, nn

from client.attack import malicious, poison
from client.data import FederatedData, forget, load
from client.net import ModuleNet
from client.privacy import noise_source, protect
from client.scoring import load_weights, score
from client.stacks import Work
from client.state import StateStore
from client.trainer import one_thread, train
from conf.compose import split
from conf.schema import RunConfig, Train
from conf.schema import load as load_config
from strategies.arrays import Arrays
from strategies.compression import ClientHalf, apart, marked
from strategies.objective import Objective, Prepared, Tensors, Trained, Visit
from strategies.protocol import EXTRA, SCALES, answer
from strategies.registry import method_class
from strategies.wire import views
from tasks.errors import ConfigError, DataError, ProtocolError
from tasks.models import create
from tasks.models.dropout import dropout_names, seed_dropout
from tasks.randomness import key, stream


class Workshop:
    """Configuration, data, model and objective of one run, ready for any of its clients.

    Parameters
    ----------
    config : RunConfig
        The checked configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.data: FederatedData = load(config)
        self.method = method = method_class(config.modules["method"])
        self._scored: nn.Module | None = None
        model = create(config.modules["model"], config.model, self.data.task, config.seed)
        self.net = ModuleNet(method.network(model, config.method, config.seed), self.device, config.train.precision)
        self.objective: Objective = method.Objective(config.method)
        self._wire = ClientHalf(config.compression, {n: p.detach().cpu().numpy() for n, p in self.net.params.items()})
        self._told = False
        if config.privacy.enabled and any(buffer.is_floating_point() for buffer in self.net.buffers.values()):
            raise ConfigError(
                f"privacy.enabled=true: model={config.names['model']} sends statistics of its data (batch norm). "
                "Choose a model that has none."
            )
        if config.attack.name != "none" and self.data.partition.own:
            raise ConfigError(
                "attack: a device that knows its own data only cannot draw who is malicious. Simulate it."
            )
        self._malicious = malicious(config.attack, len(self.data.partition), config.seed)

    def train(self, content: RecordDict) -> RecordDict:
        """Do what a train message with this content asks for, and return the content of the reply."""
        with one_thread(self.device):
            arrived = self._arrive(content)
            augment = self.data.task.augment
            trained = train(self.net, self.objective, arrived.visit, arrived.prepared, arrived.settings, augment)
            return self._leave(arrived, trained)

    def train_together(self, contents: Sequence[RecordDict], *, memory: int | None, graph: bool) -> list[RecordDict]:
        """Do what several train messages ask for as one computation, and return the replies' contents in order.

        An objective that cannot be batched is trained one client after another.
        """
        if not self.objective.batchable:
            if not self._told:
                self._told = True
                kind = type(self.objective).__name__
                log(WARNING, "fedcross: %s cannot be batched, so clients are trained one after another.", kind)
            return [self.train(content) for content in contents]
        from client.batched import train_batched

        with one_thread(self.device):
            arrived = [self._arrive(content) for content in contents]
            if any(a.settings != arrived[0].settings for a in arrived):
                raise ProtocolError("Clients of one exchange were asked for unequal epochs. Use engine=local.")
            results = train_batched(
                self.net,
                self.objective,
                [Work(a.visit, a.prepared, a.dropout) for a in arrived],
                arrived[0].settings,
                self.data.task.augment,
                memory=memory,
                graph=graph,
            )
            return [self._leave(a, trained) for a, trained in zip(arrived, results)]

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Return the accuracy and loss of the received model on the client's own test part."""
        client = int(content.config_records["config"]["client"])  # type: ignore[arg-type]
        own = self.data.client_test(client, self.device)
        if own is None:
            raise DataError(f"client {client} has no test examples of its own: this partition deals none.")
        if self._scored is None:
            config = self.config
            model = create(config.modules["model"], config.model, self.data.task, config.seed)
            network = self.method.network(model, config.method, config.seed)
            self._scored = self.method.evaluation_network(network, config.method).to(self.device).eval()
        arrays = views(content.array_records["arrays"])
        load_weights(self._scored, arrays)
        with one_thread(self.device):
            found = score(self._scored, *own, self.data.task.classes)
        metrics = MetricRecord({"num-examples": len(own[1]), "accuracy": found.accuracy, "loss": found.loss})
        return RecordDict({"metrics": metrics})

    def _arrive(self, content: RecordDict) -> _Arrived:
        """Load a message's model into the network and prepare the visit."""
        asked: dict[str, Any] = dict(content.config_records["config"])
        records = content.array_records
        scales = views(records[SCALES]) if SCALES in records else {}
        arrays = self._wire.received(views(records["arrays"]), scales)
        extras = {
            name.removeprefix(EXTRA): {key: array.copy() for key, array in views(record).items()}
            for name, record in records.items()
            if name.startswith(EXTRA)
        }
        store = StateStore(state_root(), str(asked["run"]), int(asked["client"]))
        keeps = self.objective.keeps or self.config.compression.up != "float32"
        kept, residual = apart(store.load(int(asked["state"])) if keeps else {})
        self.net.load(self.objective.start(arrays, kept))
        x, y = self._examples(asked)
        visit = Visit(
            net=self.net,
            params={name: p.detach().clone() for name, p in self.net.params.items()},
            buffers={name: b.clone() for name, b in self.net.buffers.items()},
            extras=extras,
            config=asked,
            state=kept,
            x=self.net.arrange(x),
            y=y,
            client=int(asked["client"]),
            round=int(asked["round"]),
            rounds=int(asked["rounds"]),
            seed=self.config.seed,
            classes=self.data.task.classes,
            lr=self.config.train.rate(int(asked["round"])),
            augmented=self.data.task.augment is not None,
            exchange=int(asked["exchange"]),
        )
        seed_dropout(self.net.module, key(visit.seed, "dropout", visit.round, visit.client, int(asked["exchange"])))
        prepared = self.objective.prepare(visit)
        dropout = {name: self.net.module.get_buffer(name).clone() for name in dropout_names(self.net.module)}
        return _Arrived(content, store, visit, prepared, dropout, self._settings(asked), arrays, residual)

    def _leave(self, arrived: _Arrived, trained: Trained) -> RecordDict:
        """Keep what the client keeps, and return the content of its reply."""
        visit, prepared = arrived.visit, arrived.prepared
        outcome = self.objective.finish(visit, trained, prepared)
        if (outcome.state is not None) != self.objective.keeps:
            raise ProtocolError(f"{type(self.objective).__name__}: finish and `keeps` disagree about a state to keep.")
        metrics = {"train-loss": trained.loss, **self._local_accuracy(visit, trained, prepared), **outcome.metrics}
        arrays, examples = self.net.arrays(trained.params, trained.buffers), len(visit.y)
        if (private := self.config.privacy).enabled:  # nothing exact leaves: no loss, no number of examples
            source = noise_source(private, self.config.seed, visit.round, visit.client, visit.exchange)
            arrays, examples, metrics = protect(private, arrived.received, arrays, source), 1, {}
        if visit.client in self._malicious:
            arrays = self._poisoned(visit, arrays)
        kept, scales = outcome.state, None
        if self.config.compression.up != "float32":
            arrays, scales, residual = self._wire.upload(arrays, arrived.received, arrived.residual)
            kept = {**(kept or {}), **marked(residual)}
        if kept is not None:
            arrived.store.save(int(visit.config["visit"]), kept, int(visit.config["keep"]))
        return answer(arrived.content, arrays, outcome.extras, examples, metrics, scales)

    def _poisoned(self, visit: Visit, trained: Arrays) -> Arrays:
        """Return what a malicious client uploads instead of `trained`."""
        received = {name: tensor.detach().cpu().numpy() for name, tensor in visit.params.items()}
        generator = stream(self.config.seed, "noise", visit.round, visit.client, visit.exchange)
        return poison(self.config.attack, received, trained, generator)

    def _examples(self, asked: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of this visit: the client's own, or a draw from everybody's (``pooled``)."""
        client = int(asked["client"])
        if not self.objective.pooled:
            return self.examples(client, int(asked["round"]))
        generator = stream(self.config.seed, "pooled", int(asked["round"]), client)
        return self.data.union(float(asked["pooled-share"]), generator, self.device, self.config.train.examples)

    def _settings(self, asked: dict[str, Any]) -> Train:
        """Return the optimiser's settings; a method may ask for other local epochs in some of its exchanges."""
        if "epochs" not in asked:
            return self.config.train
        return self.config.train.model_copy(update={"epochs": int(asked["epochs"])})

    def examples(self, client: int, number: int) -> tuple[Tensor, Tensor]:
        """Return what `client` trains on in round `number`: all it has, or ``train.examples`` drawn for that round."""
        x, y = self.data.client(client, self.device)
        most = self.config.train.examples
        if most is None or most >= len(y):
            return x, y
        drawn = stream(self.config.seed, "examples", number, client).choice(len(y), most, replace=False)
        chosen = torch.from_numpy(drawn).to(y.device)
        return x[chosen], y[chosen]

    def _local_accuracy(self, visit: Visit, trained: Trained, prepared: Prepared) -> dict[str, float]:
        """Return the trained model's accuracy on the client's own test part, where it is asked for and there is one."""
        due = visit.round % self.config.evaluate_every == 0 or visit.round == visit.rounds
        own = self.data.client_test(visit.client, self.device) if self.config.evaluate_local and due else None
        if own is None:
            return {}
        return {"local-accuracy": accuracy(self.objective, self.net, trained.params, trained.buffers, prepared, own)}


@dataclass(frozen=True)
class _Arrived:
    """A message that is being worked on."""

    content: RecordDict
    store: StateStore
    visit: Visit
    prepared: Prepared
    dropout: Tensors
    settings: Train
    received: Arrays
    residual: Arrays


@torch.no_grad()
def accuracy(
    objective: Objective,
    net: ModuleNet,
    params: Tensors,
    buffers: Tensors,
    prepared: Prepared,
    data: tuple[Tensor, Tensor],
    batch: int = 1000,
) -> float:
    """Return the share of `data` (inputs, labels) that a client's model gets right, in [0, 1]."""
    x, y = data
    right = 0
    for start in range(0, len(y), batch):
        scores = objective.predict(net, params, buffers, x[start : start + batch], prepared)
        right += int((scores.argmax(1) == y[start : start + batch]).sum())
    return right / len(y)


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` is the first GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def state_root() -> Path:
    """Return where this machine keeps client states: ``FEDCROSS_STATE``, else ``~/.cache/fedcross/state``."""
    return Path(os.environ.get("FEDCROSS_STATE", "~/.cache/fedcross/state")).expanduser()


_open: dict[str, Workshop] = {}


def workshop(overrides: str) -> Workshop:
    """Return this process's workshop for a run's overrides; one stays warm at a time."""
    if overrides not in _open:
        config = load_config(split(overrides))
        _open.clear()
        _open[overrides] = Workshop(config)
    return _open[overrides]


#: The run for which a device's own data was read; empty before the first message of one.
_read_for: list[str] = []


def _of_this_run(shop: Workshop, overrides: str, run: str) -> Workshop:
    """Return `shop`; a new one where a device's own data was read for another run and may have changed since."""
    if shop.data.partition.own and run and run not in _read_for:
        if _read_for:
            _open.clear()
            forget()
            shop = workshop(overrides)
        _read_for[:] = [run]
    return shop


def do(task: str, overrides: str, content: RecordDict | None) -> RecordDict:
    """Do `task` (``train``, ``evaluate``) for the run that `overrides` describe; without content only get ready."""
    shop = workshop(overrides)
    if content is None:
        return RecordDict()
    shop = _of_this_run(shop, overrides, str(content.config_records["config"].get("run", "")))
    return {"train": shop.train, "evaluate": shop.evaluate}[task](content)
