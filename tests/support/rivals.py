"""What the tests of FedGen, CluSamp and Flower's strategies share: a hand-made linear client, losses on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp import ClientApp
from torch import nn

from fedcross.client.app import app as client_app
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.schema import Train
from fedcross.strategies.method import Method, Task, Upload
from fedcross.strategies.objective import Visit
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models._split import Split
from tests.support.federation import run, same
from tests.support.game import Game

#: Two full-batch steps of length .5, no momentum.
TWO_STEPS = Train(lr=0.5, epochs=2, batch=1000)


def linear(weight: Any, bias: Any) -> Split:
    """Return the float64 classifier ``weight @ x + bias`` without feature layers."""
    values = torch.tensor(weight, dtype=torch.float64)
    head = nn.Linear(values.shape[1], values.shape[0], dtype=torch.float64)
    head.weight.data.copy_(values)
    head.bias.data.copy_(torch.tensor(bias, dtype=torch.float64))
    return Split(nn.Identity(), head)


def begin(kind: type[Method], module: Split, **values: Any) -> tuple[Game, ModuleNet]:
    """Return a game of a method that starts from the weights of `module`, and the network."""
    net = ModuleNet(module, torch.device("cpu"))
    return Game(kind, {name: array.copy() for name, array in net.read().items()}, set(net.params), **values), net


def visit_of(net: ModuleNet, payload: Task, x: Any, y: Any, number: int = 1) -> Visit:
    """Return the visit of the client that got `payload` and owns (x, y); `net` is loaded with the model."""
    net.load(payload.arrays)
    return Visit(
        net=net,
        params={name: p.detach().clone() for name, p in net.params.items()},
        buffers={name: b.clone() for name, b in net.buffers.items()},
        extras=payload.extras,
        config=payload.config,
        state={},
        inputs=Inputs(torch.as_tensor(x, dtype=torch.float64)),
        y=torch.as_tensor(y, dtype=torch.int64),
        client=payload.client,
        round=number,
        rounds=10,
        seed=0,
        classes=net.module.classifier.out_features,
        lr=TWO_STEPS.lr,
    )


def work(method: Game, net: ModuleNet, payload: Task, x: Any, y: Any, number: int = 1) -> Upload:
    """Do a client's two steps with the real trainer and return its upload."""
    objective = method.method.objective()
    visit = visit_of(net, payload, x, y, number)
    prepared = objective.prepare(visit)
    trained = train(net, objective, visit, prepared, TWO_STEPS)
    outcome = objective.finish(visit, trained, prepared)
    model = {name: array.copy() for name, array in net.read().items()}  # the wire copies, `read` gives views
    return Upload(payload.client, payload.slot, model, outcome.extras, len(visit.y), {})


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max())
    return e / e.sum()


def losing(lost: Callable[[int, int], bool]) -> ClientApp:
    """Return the client app; the reply of `client` in `round` gets lost where `lost(client, round)` says so."""
    app = ClientApp()

    @app.train()
    def train_and_lose(message: Any, context: Any) -> Any:
        reply = client_app(message, context)
        asked = message.content.config_records["config"]
        if lost(int(asked["client"]), int(asked["round"])):
            raise RuntimeError("link down")
        return reply

    return app


def check_resume(folder: Path, *overrides: str) -> None:
    """Assert that two rounds, a stop and two rounds after it leave the server as four rounds do, to the bit."""
    whole = run(folder / "whole", *overrides, "rounds=4")
    run(folder / "half", *overrides, "rounds=2")
    resumed = run(folder / "half", *overrides, "rounds=4", f"resume={folder / 'half'}")
    before, after = whole.driver.checkpoint(), resumed.driver.checkpoint()
    assert same(dict(sorted(before.arrays.items())), dict(sorted(after.arrays.items())))
    assert before.values == after.values
