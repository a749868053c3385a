"""Bare commands against the methods written out here with torch alone, from the papers.

What the references share with the project is what a run is given: its data, its initial model, and the keyed streams
of :mod:`core.randomness` that decide who is drawn and how examples are shuffled. Training, aggregation, selection and
mixing are written anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import fedcross
from fedcross.conf.schema import load
from fedcross.core.randomness import stream
from fedcross.tasks.models import create

ROUNDS = 10
#: Settings of a bare run that the references need: those of conf/config.yaml and conf/partition/dirichlet_20.yaml.
SEED, CLIENTS, DRAWN, LR, MOMENTUM, EPOCHS, BATCH = 1, 20, 10, 0.01, 0.5, 5, 50
ALPHA = 0.99
#: Largest difference of a weight after all rounds.
TOLERANCE = 1e-6

State = dict[str, Tensor]


class Federation:
    """The data of all clients, and one network to train in."""

    def __init__(self) -> None:
        config = load(["task=digits"])
        data = config.load_data()
        self.clients = [data.client(i, torch.device("cpu")) for i in range(CLIENTS)]
        self.net = create("mlp", config.model, data.task, SEED)
        self.initial = self.copied()

    def copied(self) -> State:
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def train(self, start: State, number: int, client: int, correction: State | None = None) -> tuple[State, int]:
        """Return the model after the client's SGD from `start`, and the number of steps; `correction` joins g."""
        self.net.load_state_dict(start)
        x, y = self.clients[client]
        velocity = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}
        steps = 0
        for epoch in range(EPOCHS):
            order = torch.from_numpy(stream(SEED, "shuffle", number, client, epoch).permutation(len(y)))
            for rows in order.split(BATCH):
                self.net.zero_grad()
                cross_entropy(self.net(x[rows]), y[rows]).backward()
                steps += 1
                with torch.no_grad():
                    for name, p in self.net.named_parameters():
                        g = p.grad + (correction[name] if correction else 0)
                        velocity[name] = MOMENTUM * velocity[name] + g
                        p -= LR * velocity[name]
        return self.copied(), steps


def drawn(number: int) -> list[int]:
    return [int(i) for i in stream(SEED, "sample", number).choice(CLIENTS, size=DRAWN, replace=False)]


def mean(models: list[State], weights: list[float]) -> State:
    total = sum(weights)
    return {name: sum(w / total * m[name].double() for w, m in zip(weights, models)).float() for name in models[0]}


def fedavg(federation: Federation) -> State:
    """McMahan et al. 2017, algorithm 1."""
    model = federation.initial
    for number in range(1, ROUNDS + 1):
        clients = drawn(number)
        models = [federation.train(model, number, client)[0] for client in clients]
        model = mean(models, [len(federation.clients[client][1]) for client in clients])
    return model


def scaffold(federation: Federation) -> State:
    """Karimireddy et al. 2020, algorithm 1, option II, global step 1; a drift counts each gradient as momentum does."""
    model = federation.initial
    zero = {name: torch.zeros_like(value) for name, value in model.items()}
    own = [zero] * CLIENTS
    for number in range(1, ROUNDS + 1):
        c = mean(own, [1.0] * CLIENTS)
        models, changed = [], list(own)
        for client in drawn(number):
            apart = {n: c[n] - own[client][n] for n in c}
            trained, steps = federation.train(model, number, client, apart)
            # Gradient i is still in steps i, i + 1, ...: 1 + rho + rho^2 + ... of it in the end.
            length = sum(MOMENTUM**later for i in range(steps) for later in range(steps - i))
            changed[client] = {n: (model[n] - trained[n]) / (length * LR) - apart[n] for n in c}
            models.append(trained)
        model, own = mean(models, [1.0] * DRAWN), changed
    return model


def in_order(models: list[State], number: int) -> list[int]:
    """Return i + 1 + (r mod (K - 1)) for every model i, r counted from 0."""
    return [(i + 1 + (number - 1) % (DRAWN - 1)) % DRAWN for i in range(DRAWN)]


def lowest_similarity(models: list[State], number: int) -> list[int]:
    """Return for every model the other one with the smallest cosine."""
    rows = torch.stack([torch.cat([value.reshape(-1) for value in model.values()]) for model in models]).double()
    cosines = cosine_similarity(rows[:, None], rows[None], dim=2)
    return [int(row) for row in cosines.fill_diagonal_(2.0).argmin(1)]


def fed_cross(federation: Federation, selection) -> State:
    """Hu et al. 2024, algorithm 1: model i to the i-th drawn client, alpha of it and 1 - alpha of a collaborator."""
    pool = [federation.initial] * DRAWN
    for number in range(1, ROUNDS + 1):
        uploads = [federation.train(w, number, client)[0] for w, client in zip(pool, drawn(number))]
        partners = selection(uploads, number)
        pool = [mean([v, uploads[j]], [ALPHA, 1 - ALPHA]) for v, j in zip(uploads, partners)]
    return mean(pool, [1.0] * DRAWN)


def bare(folder: Path, *overrides: str) -> State:
    """Return the final model of a run that sets nothing but these."""
    fedcross.run("task=digits", f"rounds={ROUNDS}", f"output={folder}", *overrides)
    return load_file(folder / "model.safetensors")


def difference(a: State, b: State) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "reference"),
    [
        (["method=fedavg"], fedavg),
        (["method=scaffold"], scaffold),
        (["method=fedcross"], lambda known: fed_cross(known, lowest_similarity)),
        (["method=fedcross", "method.selection=in_order"], lambda known: fed_cross(known, in_order)),
    ],
    ids=["fedavg", "scaffold", "fedcross", "fedcross in order"],
)
def test_a_bare_run_is_the_method(tmp_path: Path, federation: Federation, overrides: list[str], reference) -> None:
    made, expected = bare(tmp_path / "run", *overrides), reference(federation)
    assert difference(expected, federation.initial) > 0.01  # it has learned: equality says something
    assert difference(made, expected) <= TOLERANCE


def test_the_comparison_sees_a_defence(tmp_path: Path, federation: Federation) -> None:
    """Half of all honest updates shortened, the fault that this file was written for."""
    assert difference(bare(tmp_path / "run", "method=fedavg", "defence.enabled=true"), fedavg(federation)) > 1e-3
