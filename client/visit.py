"""What arrives: a train message becomes a visit, with its model loaded and everything ready to train."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedcross.client.state import StateStore
from fedcross.conf.schema import Train
from fedcross.core.randomness import key, stream
from fedcross.strategies.parts.objective import Prepared, Tensors, Visit
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.wire.compression import apart
from fedcross.strategies.wire.protocol import EXTRA, SCALES
from fedcross.strategies.wire.records import views
from fedcross.tasks.models.dropout import seed_dropout

if TYPE_CHECKING:
    from fedcross.client.workshop import Workshop


@dataclass(frozen=True)
class Arrived:
    """A message that is being worked on.

    Attributes
    ----------
    content : RecordDict
        Of the message.
    visit : Visit
        What the objective sees of it.
    prepared : Prepared
        What ``objective.prepare(visit)`` returned.
    dropout : Tensors
        The state of every dropout layer at the start, by buffer name.
    settings : Train
        The optimiser's, with the epochs that this exchange asks for.
    received : Arrays
        The model that was sent, decoded.
    residual : Arrays
        What the client still owes the server from compressed uploads; empty without compression.
    store : StateStore or None
        Where the client keeps what it keeps; None where it keeps nothing.
    """

    content: RecordDict
    visit: Visit
    prepared: Prepared
    dropout: Tensors
    settings: Train
    received: Arrays
    residual: Arrays
    store: StateStore | None


def arrive(shop: Workshop, content: RecordDict) -> Arrived:
    """Load the model of a train message with this content into the network of `shop`, and prepare the visit."""
    config, net, objective = shop.config, shop.net, shop.objective
    asked: dict[str, Any] = dict(content.config_records["config"])
    client, number, exchange = int(asked["client"]), int(asked["round"]), int(asked["exchange"])
    received, extras = _arrays(shop, content)
    store, kept, residual = None, Arrays(), Arrays()
    if objective.keeps or config.compression.up != "float32":
        store = StateStore(state_root(), str(asked["run"]), client)
        kept, residual = apart(store.load(int(asked["state"])))
    net.load(objective.start(received, kept))
    if objective.pooled:
        x, y = pooled_examples(shop, client, number, float(asked["pooled-share"]))
    else:
        x, y = examples(shop, client, number)
    visit = Visit(
        net=net,
        params={name: p.detach().clone() for name, p in net.params.items()},
        buffers={name: b.clone() for name, b in net.buffers.items()},
        extras=extras,
        config=asked,
        state=kept,
        x=net.arrange(x),
        y=y,
        client=client,
        round=number,
        rounds=int(asked["rounds"]),
        seed=config.seed,
        classes=shop.data.task.classes,
        lr=config.train.rate(number),
        augmented=shop.data.task.augment is not None,
        exchange=exchange,
    )
    if net.dropout:
        seed_dropout(net.module, key(config.seed, "dropout", number, client, exchange))
    prepared = objective.prepare(visit)
    dropout = {name: net.module.get_buffer(name).clone() for name in net.dropout}
    settings = config.train
    if "epochs" in asked:  # a method may ask for other local epochs in some of its exchanges
        settings = settings.model_copy(update={"epochs": int(asked["epochs"])})
    return Arrived(content, visit, prepared, dropout, settings, received, residual, store)


def _arrays(shop: Workshop, content: RecordDict) -> tuple[Arrays, dict[str, Arrays]]:
    """Return the model and the groups of further arrays that a message brings."""
    records = content.array_records
    model = views(records["arrays"])
    if shop.config.compression.down != "float32":
        model = shop.wire.received(model, views(records[SCALES]) if SCALES in records else {})
    extras = {
        name.removeprefix(EXTRA): {key: array.copy() for key, array in views(record).items()}
        for name, record in records.items()
        if name.startswith(EXTRA)
    }
    return model, extras


def pooled_examples(shop: Workshop, client: int, number: int, share: float) -> tuple[Tensor, Tensor]:
    """Return inputs and labels drawn for round `number` from everybody's data, a `share` of it (references only)."""
    draw = stream(shop.config.seed, "pooled", number, client)
    return shop.data.union(share, draw, shop.device, shop.config.train.examples)


def examples(shop: Workshop, client: int, number: int) -> tuple[Tensor, Tensor]:
    """Return what `client` trains on in round `number`: all it has, or ``train.examples`` drawn for that round."""
    x, y = shop.data.client(client, shop.device)
    most = shop.config.train.examples
    if most is None or most >= len(y):
        return x, y
    drawn = stream(shop.config.seed, "examples", number, client).choice(len(y), most, replace=False)
    chosen = torch.from_numpy(drawn).to(y.device)
    return x[chosen], y[chosen]


def state_root() -> Path:
    """Return where this machine keeps client states: ``FEDCROSS_STATE``, else ``~/.cache/fedcross/state``."""
    return Path(os.environ.get("FEDCROSS_STATE", "~/.cache/fedcross/state")).expanduser()
