"""A hand-made linear client for the tests of FedGen and CluSamp."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedcross.client.flat_model import ModuleNet
from fedcross.strategies.method import Method, Task, Upload
from fedcross.strategies.objective import Visit
from fedcross.tasks.models._split import Split
from tests.support.bench import TWO_STEPS, open_visit, trained
from tests.support.game import Game


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
    sent = {"extras": payload.extras, "config": payload.config, "client": payload.client}
    return open_visit(net, x, y, round=number, rounds=10, lr=TWO_STEPS.lr, **sent)


def work(method: Game, net: ModuleNet, payload: Task, x: Any, y: Any, number: int = 1) -> Upload:
    """Do a client's two steps with the real trainer and return its upload."""
    objective = method.method.objective()
    visit = visit_of(net, payload, x, y, number)
    outcome = trained(net, objective, visit)
    model = {name: array.copy() for name, array in net.read().items()}  # the wire copies, `read` gives views
    return Upload(payload.client, payload.slot, model, outcome.extras, len(visit.y), {})
