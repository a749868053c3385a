"""One train message: :func:`receive` loads the model and prepares the training, :func:`reply` makes the reply.

The reply applies privacy, attack and compression to the trained model, and stores the client's state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedcross.client.attack import poison
from fedcross.client.privacy import noise_source, protect
from fedcross.client.state import StateStore
from fedcross.conf.schema import Train
from fedcross.core.errors import ProtocolError
from fedcross.core.randomness import key, stream
from fedcross.strategies.objective import Prepared, Tensors, Trained, Visit
from fedcross.strategies.wire.compression import apart, marked
from fedcross.strategies.wire.protocol import EXTRA, SCALES, answer
from fedcross.strategies.wire.records import Arrays, views
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.dropout import seed_dropout
from fedcross.tasks.scoring import accuracy

if TYPE_CHECKING:
    from fedcross.client.cache import RunCache
    from fedcross.client.flat_model import ModuleNet
    from fedcross.strategies.wire.compression import ClientHalf

#: Most bytes of examples that a process keeps in memory between visits, and their share of a GPU's memory.
KEPT_BYTES = 2**26
KEPT_SHARE = 0.03


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
        The result of ``objective.prepare(visit)``.
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


def receive(cache: RunCache, content: RecordDict, net: ModuleNet, wire: ClientHalf) -> Request:
    """Load the model of a train message with this `content` into `net`, of the size it asks for; prepare the visit."""
    config, objective = cache.config, cache.objective
    asked: dict[str, Any] = dict(cast(ConfigRecord, content["config"]))
    client, number, exchange = int(asked["client"]), int(asked["round"]), int(asked["exchange"])
    _check_base(cache, str(asked.get("base", "")))
    received, extras = _arrays(wire, content)
    store, kept, residual = None, Arrays(), Arrays()
    if objective.keeps or config.compression.up != "float32":
        store = StateStore(state_root(), str(asked["run"]), client)
        kept, residual = apart(store.load(int(asked["state"])))
    net.load(objective.start(received, kept))
    settings = _asked_training(config.train, asked)
    if objective.pooled:
        inputs, y = pooled_examples(cache, client, number, float(asked["pooled-share"]))
    else:
        inputs, y = examples(cache, client, number)
    visit = Visit(
        net=net,
        params=dict(zip(net.params, net.split(net.flat.clone()))),
        buffers={name: b.clone() for name, b in net.buffers.items()},
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
    prepared = objective.prepare(visit)
    scratch = {name: net.module.get_buffer(name).clone() for name in (*net.dropout, *net.base_buffers)}
    return Request(content, net, wire, visit, prepared, scratch, settings, received, residual, store)


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
    """Return the settings of training with the epochs and the learning rate that the method asks for, if it does.

    A method may ask for others in some of its exchanges.
    """
    kinds = {"epochs": int, "lr": float}
    found = {name: kind(asked[name]) for name, kind in kinds.items() if name in asked}
    return settings.model_copy(update=found) if found else settings


def _arrays(wire: ClientHalf, content: RecordDict) -> tuple[Arrays, dict[str, Arrays]]:
    """Return the model and the groups of further arrays in a message."""
    records = content.array_records
    model = views(records["arrays"])
    if wire.settings.down != "float32":
        model = wire.received(model, views(records[SCALES]) if SCALES in records else {})
    extras = {
        name.removeprefix(EXTRA): {key: array.copy() for key, array in views(record).items()}
        for name, record in records.items()
        if name.startswith(EXTRA)
    }
    return model, extras


def pooled_examples(cache: RunCache, client: int, number: int, share: float) -> tuple[Inputs, Tensor]:
    """Return inputs and labels of a `share` of all clients' data, drawn for round `number` (reference methods only)."""
    draw = stream(cache.config.seed, "pooled", number, client)
    inputs, y = cache.data.union(share, draw, cache.device, cache.config.train.examples)
    return inputs.like(cache.arrange(inputs.held)), y


def examples(cache: RunCache, client: int, number: int) -> tuple[Inputs, Tensor]:
    """Return the training data of `client` in round `number`: all its examples, or ``train.examples`` of them."""
    inputs, y = _own(cache, client)
    most = cache.config.train.examples
    if most is None or most >= len(y):
        return inputs, y
    drawn = stream(cache.config.seed, "examples", number, client).choice(len(y), most, replace=False)
    chosen = torch.from_numpy(drawn).to(y.device)
    return inputs.like(cache.arrange(inputs.held[chosen])), y[chosen]


def _own(cache: RunCache, client: int) -> tuple[Inputs, Tensor]:
    """Return all training examples of `client`, inputs in the network's memory layout.

    They stay in memory for later visits while ``KEPT_BYTES`` allow it.
    """
    if client in cache.prepared:
        return cache.prepared[client]
    inputs, y = cache.data.inputs(client, cache.device)
    own = inputs.like(cache.arrange(inputs.held)), y
    kept = sum(part.nbytes for pair in (*cache.prepared.values(), own) for part in pair)
    if kept <= kept_bytes(cache.device):
        cache.prepared[client] = own
    return own


def kept_bytes(device: torch.device) -> float:
    """Return how many bytes of examples stay on `device` between visits."""
    if device.type != "cuda":
        return KEPT_BYTES
    _, total = torch.cuda.mem_get_info(device)
    return max(KEPT_BYTES, total * KEPT_SHARE)


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
    outcome = objective.finish(visit, trained, request.prepared)
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
        arrays = _poisoned(cache, visit, arrays)
    kept, scales = outcome.state, None
    if config.compression.up != "float32":
        arrays, scales, residual = request.wire.upload(arrays, request.received, request.residual)
        kept = {**(kept or {}), **marked(residual)}
    if kept is not None and request.store is not None:
        request.store.save(int(visit.config["visit"]), kept, int(visit.config["keep"]))
    return answer(request.content, arrays, outcome.extras, examples, metrics, scales)


def _poisoned(cache: RunCache, visit: Visit, trained: Arrays) -> Arrays:
    """Return what a malicious client uploads instead of `trained`."""
    received = {name: tensor.detach().cpu().numpy() for name, tensor in visit.params.items()}
    generator = stream(cache.config.seed, "noise", visit.round, visit.client, visit.exchange)
    return poison(cache.config.attack, received, trained, generator)


def _local_accuracy(cache: RunCache, request: Request, trained: Trained) -> dict[str, float]:
    """Return the trained model's accuracy on the client's own test part; empty if not due, or without a test part."""
    config, visit = cache.config, request.visit
    due = visit.round % config.evaluate_every == 0 or visit.round == visit.rounds
    own = cache.data.client_test(visit.client, cache.device) if config.evaluate_local and due else None
    if own is None:
        return {}

    def predict(x: Tensor) -> Tensor:
        return cache.objective.predict(request.net, trained.params, trained.buffers, x, request.prepared)

    return {"local-accuracy": accuracy(predict, *own)}
