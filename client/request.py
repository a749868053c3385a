"""Answers one message of a run: loads the model that it brings, trains or scores it, and makes the reply.

The reply applies privacy, attack and compression to the trained model, and stores the client's state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedcross.client.attack import poison
from fedcross.client.cache import RunCache, run_cache
from fedcross.client.device import evaluation_batch
from fedcross.client.flat_model import ModuleNet
from fedcross.client.privacy import noise_source, protect
from fedcross.client.state import StateStore
from fedcross.client.trainer import train
from fedcross.conf.schema import Train
from fedcross.core.errors import DataError, ProtocolError
from fedcross.core.randomness import key, stream
from fedcross.strategies.filters.compression import ClientHalf, apart, marked
from fedcross.strategies.objective import Outcome, Prepared, Tensors, Trained, Visit
from fedcross.strategies.parts.widths import asked as asked_width
from fedcross.strategies.wire.records import EXTRA, SCALES, Arrays, answer, views
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.dropout import seed_dropout
from fedcross.tasks.models.weights import load_arrays
from fedcross.tasks.scoring import accuracy, score


class LocalClient:
    """The clients of one run in this process: what Flower's ClientApp is for its own engines.

    The configuration `overrides`, data and model are loaded at the first message and stay until the run ends.
    """

    def __init__(self, overrides: str) -> None:
        self._overrides = overrides
        self._cache: RunCache | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply to `message`."""
        task, content = message.metadata.message_type, message.content
        self._cache = self._cache or run_cache(self._overrides, str(content.config_records["config"].get("run", "")))
        return Message(carry_out(self._cache, task, content), reply_to=message)


def carry_out(cache: RunCache, task: str, content: RecordDict) -> RecordDict:
    """Return the content of the reply to a message: `task` is ``train`` or ``evaluate``."""
    with cache.errors(), cache.repeats(), one_thread(cache.device):
        return {"train": train_one, "evaluate": evaluate}[task](cache, content)


def train_one(cache: RunCache, content: RecordDict) -> RecordDict:
    """Train as a train message with this content asks, and return the content of the reply."""
    one = receive(cache, content)
    step = cache.compiled(one.net, stacked=False) if cache.compiles else None
    augment = cache.data.task.augment
    trained = train(one.net, cache.objective, one.visit, one.prepared, one.settings, augment, compiled=step)
    return reply(cache, one, trained)


def evaluate(cache: RunCache, content: RecordDict) -> RecordDict:
    """Return the accuracy and loss of the received model on the client's own test part."""
    asked = cast(ConfigRecord, content["config"])
    client, size = int(asked["client"]), asked_width(asked)  # type: ignore[arg-type]
    own = cache.data.client_test(client, cache.device)
    if own is None:
        raise DataError(f"client {client} has no test examples of its own: this partition gives clients none.")
    if size not in cache.scored:
        fitting = cache.config.new_method().network(cache.network(size), deployed=True)
        cache.scored[size] = fitting.to(cache.device).eval()
    load_arrays(cache.scored[size], views(cast(ArrayRecord, content["arrays"])))
    batch = evaluation_batch(cache.device, own[0][0].numel())
    found = score(cache.scored[size], *own, cache.data.task.classes, batch)
    metrics = MetricRecord({"num-examples": len(own[1]), "accuracy": found.accuracy, "loss": found.loss})
    return RecordDict({"metrics": metrics})


@dataclass(frozen=True)
class Request:
    """A train message that the client is working on.

    Attributes
    ----------
    content : RecordDict
        The content of the message.
    net, wire : ModuleNet, ClientHalf
        The network of the size that the message asks for, and its compression.
    visit : Visit
        The objective's view of the message and of the client's data.
    prepared : Prepared
        The result of ``objective.prepare(visit)``; empty without it.
    scratch : Tensors
        Buffers that training changes and nobody sends, at the start, by name: the states of the dropout layers, and
        what a base outside the model has (``train.only``).
    settings : Train
        Settings of the optimiser, with the number of epochs for this exchange.
    received : Arrays
        The received model, decoded.
    residual : Arrays
        The error that earlier compressed uploads left out (error feedback); empty without compression.
    store : StateStore or None
        Stores the client's state; None if the client keeps none.
    """

    content: RecordDict
    net: ModuleNet
    wire: ClientHalf
    visit: Visit
    prepared: Prepared
    scratch: Tensors
    settings: Train
    received: Arrays
    residual: Arrays
    store: StateStore | None


def receive(cache: RunCache, content: RecordDict) -> Request:
    """Load the model of a train message into the network of the width that it asks for; prepare the visit."""
    config, objective = cache.config, cache.objective
    asked: dict[str, Any] = dict(cast(ConfigRecord, content["config"]).items())
    client, number, exchange = int(asked["client"]), int(asked["round"]), int(asked["exchange"])
    net, wire = cache.at(asked_width(asked)) if "width" in asked else cache.full
    _check_base(cache, str(asked.get("base", "")))
    received, extras = _arrays(wire, content)
    store, kept, residual = None, Arrays(), Arrays()
    if objective.keeps or config.compression.up != "float32":
        store = StateStore(state_root(), str(asked["run"]), client)
        kept, residual = apart(store.load(int(asked["state"])))
    params, buffers = net.begin(objective.start(received, kept) if objective.start else received)
    settings = _asked_training(config.train, asked)
    share = float(asked["pooled-share"]) if objective.pooled else None
    inputs, y = examples(cache, net, client, number, share)
    visit = Visit(
        net=net,
        params=params,
        buffers=buffers,
        extras=extras,
        config=asked,
        state=kept,
        inputs=inputs,
        y=y,
        client=client,
        round=number,
        rounds=int(asked["rounds"]),
        seed=config.seed,
        classes=cache.data.task.classes,
        lr=learning_rate(settings, number),
        augmented=cache.data.task.augment is not None,
        exchange=exchange,
    )
    if net.dropout:
        seed_dropout(net.module, key(config.seed, "dropout", number, client, exchange))
    prepared = objective.prepare(visit) if objective.prepare else {}
    scratch = {name: net.module.get_buffer(name).clone() for name in (*net.dropout, *net.base_buffers)}
    return Request(content, net, wire, visit, prepared, scratch, settings, received, residual, store)


def examples(
    cache: RunCache, net: ModuleNet, client: int, number: int, share: float | None = None
) -> tuple[Inputs, Tensor]:
    """Return the training data of `client` in round `number`: all its examples, or ``train.examples`` of them.

    With a `share`, for reference methods only, that share of all clients' data together is drawn.
    """
    config = cache.config
    most = config.train.examples
    if share is not None:
        draw = stream(config.seed, "pooled", number, client)
        inputs, y = cache.data.union(share, draw, cache.device, most)
        return inputs.like(net.arrange(inputs.held)), y
    inputs, y = cache.examples.get(client) or cache.read(client, net)
    if most is None or most >= len(y):
        return inputs, y
    drawn = stream(config.seed, "examples", number, client).choice(len(y), most, replace=False)
    chosen = torch.from_numpy(drawn).to(y.device)
    return inputs.like(net.arrange(inputs.held[chosen])), y[chosen]


def _check_base(cache: RunCache, expected: str) -> None:
    """Raise a ProtocolError unless the untrained rest of the model (``train.only``) is the same here as at the server.

    Random weights of one seed can differ in their last bits between kinds of processors.
    """
    if expected and expected != cache.base:
        raise ProtocolError(
            f"The base of the model differs: its SHA-256 is {cache.base[:16]}... here and {expected[:16]}... at the "
            "server. Give every device the same file: train.base=FILE train.base_sha256=DIGEST."
        )


def _asked_training(settings: Train, asked: Mapping[str, Any]) -> Train:
    """Return `settings` with the epochs and the learning rate that the method asks for in this exchange, if any."""
    kinds = {"epochs": int, "lr": float}
    found = {name: kind(asked[name]) for name, kind in kinds.items() if name in asked}
    return settings.model_copy(update=found) if found else settings


def _arrays(wire: ClientHalf, content: RecordDict) -> tuple[Arrays, dict[str, Arrays]]:
    """Return the model and the groups of further arrays in a message."""
    records = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    model = views(records["arrays"])
    if wire.settings.down != "float32":
        model = wire.received(model, views(records[SCALES]) if SCALES in records else {})
    extras = {
        name.removeprefix(EXTRA): {key: array.copy() for key, array in views(record).items()}
        for name, record in records.items()
        if name.startswith(EXTRA)
    }
    return model, extras


def learning_rate(settings: Train, number: int) -> float:
    """Return the learning rate of round `number` (from 1)."""
    return max(settings.lr * settings.lr_decay ** (number - 1), settings.lr_min)


def state_root() -> Path:
    """Return the folder of client states on this machine: ``FEDCROSS_STATE``, else ``~/.cache/fedcross/state``."""
    return Path(os.environ.get("FEDCROSS_STATE", "~/.cache/fedcross/state")).expanduser()


def reply(cache: RunCache, request: Request, trained: Trained) -> RecordDict:
    """Store the client's state and return the content of its reply.

    Raises
    ------
    ProtocolError
        If the objective keeps a state without declaring it, or declares one and returns none; or if it would send more
        than the model although ``privacy.enabled``.
    """
    config, objective, visit = cache.config, cache.objective, request.visit
    outcome = objective.finish(visit, trained, request.prepared) if objective.finish else Outcome()
    if (outcome.state is not None) != objective.keeps:
        raise ProtocolError(f"{type(objective).__name__}: finish and `keeps` disagree about a state to keep.")
    if config.privacy.enabled and outcome.extras:  # no method that is allowed does, but a server could ask for it
        raise ProtocolError(f"privacy.enabled=true: {', '.join(outcome.extras)} asked for, which no noise protects.")
    metrics = {"train-loss": trained.loss, **_local_accuracy(cache, request, trained), **outcome.metrics}
    arrays, examples = request.net.arrays(trained.params, trained.buffers), len(visit.y)
    if config.privacy.enabled:  # the upload holds no exact numbers: no loss, no number of examples
        source = noise_source(config.privacy, config.seed, visit.round, visit.client, visit.exchange)
        arrays = protect(config.privacy, request.received, arrays, source, request.net.frozen)
        examples, metrics = 1, {}
    if visit.client in cache.malicious:
        start = {name: tensor.detach().cpu().numpy() for name, tensor in visit.params.items()}
        noise = stream(config.seed, "noise", visit.round, visit.client, visit.exchange)
        arrays = poison(config.attack, start, arrays, noise)
    kept, scales = outcome.state, None
    if config.compression.up != "float32":
        arrays, scales, residual = request.wire.upload(arrays, request.received, request.residual)
        kept = {**(kept or {}), **marked(residual)}
    if kept is not None and request.store is not None:
        request.store.save(int(visit.config["visit"]), kept, int(visit.config["keep"]))
    return answer(request.content, arrays, outcome.extras, examples, metrics, scales)


def _local_accuracy(cache: RunCache, request: Request, trained: Trained) -> dict[str, float]:
    """Return the trained model's accuracy on the client's own test part; empty if not due, or without a test part."""
    config, visit = cache.config, request.visit
    if not config.evaluate_local or (visit.round % config.evaluate_every and visit.round != visit.rounds):
        return {}
    own = cache.data.client_test(visit.client, cache.device)
    if own is None:
        return {}

    def predict(x: Tensor) -> Tensor:
        return cache.objective.predict(request.net, trained.params, trained.buffers, x, request.prepared)

    return {"local-accuracy": accuracy(predict, *own)}


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread for CPU training inside the block.

    Several clients train at the same time, and the result must not depend on the machine's number of cores.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
