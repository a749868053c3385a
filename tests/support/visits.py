"""Clients with random data and a network of their own, for tests of the trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedcross.client.batched.stack import Work
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.schema import Train
from fedcross.core.randomness import key
from fedcross.strategies.objective import Objective, Prepared, Visit
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models._split import Split
from fedcross.tasks.models.dropout import Dropout, dropout_states, seed_dropout

CPU = torch.device("cpu")


def small_net(
    *, norm: bool = False, dropout: bool = False, hidden: int = 8, dtype: torch.dtype = torch.float64
) -> ModuleNet:
    """Return a little CNN for 2x6x6 images and 3 classes."""
    torch.manual_seed(7)
    parts: list[nn.Module] = [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2)]
    if norm:
        parts.append(nn.BatchNorm2d(4))
    parts += [nn.ReLU(), nn.Flatten(), nn.Linear(16, hidden), nn.ReLU()]
    if dropout:
        parts.append(Dropout(0.4))
    return ModuleNet(Split(nn.Sequential(*parts), nn.Linear(hidden, 3)).to(dtype), CPU)


def visit(net: ModuleNet, client: int, n: int, **changes: Any) -> Visit:
    """Return a visit of a client with `n` random examples, starting from weights of its own."""
    generator = torch.Generator().manual_seed(100 + client)
    kind = net.flat.dtype

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator, dtype=kind).to(tensor.device)

    values: dict[str, Any] = {
        "params": {name: moved(p) for name, p in net.params.items()},
        "buffers": {name: b.clone() for name, b in net.buffers.items()},
        "extras": {},
        "config": {},
        "state": {},
        "inputs": Inputs(torch.randn((n, 2, 6, 6), generator=generator, dtype=kind)),
        "y": torch.randint(0, 3, (n,), generator=generator),
        "client": client,
        "round": 3,
        "rounds": 10,
        "seed": 11,
        "classes": 3,
        "lr": 0.1,
    }
    return Visit(net=net, **(values | changes))


def settings(**changes: Any) -> Train:
    values: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, "epochs": 2, "batch": 4}
    return Train(**(values | changes))


def work(net: ModuleNet, objective: Objective, one: Visit) -> Work:
    """Prepare `one` as a client does."""
    enter(net, one)
    return Work(one, prepared(objective, one), dropout_states(net.module, _key(one)))


def prepared(objective: Objective, one: Visit) -> Prepared:
    """Return what the functions of `objective` need in the visit `one`."""
    return objective.prepare(one) if objective.prepare else {}


def enter(net: ModuleNet, one: Visit) -> None:
    """Load a visit's model and dropout states into `net`."""
    net.load({name: t.numpy() for name, t in {**one.params, **one.buffers}.items()})
    seed_dropout(net.module, _key(one))


def _key(one: Visit) -> int:
    return key(one.seed, "dropout", one.round, one.client)
