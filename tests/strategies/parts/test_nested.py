"""Nested training: which steps train which corner, by hand, and the same in the sequential and the batched trainer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.schema import Train
from fedcross.strategies.parts.nested import Nested, corner, cycle, table
from fedcross.strategies.parts.objective import Batch
from fedcross.strategies.parts.widths import Widths
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models.slicing import FULL, Size
from tests.support.federation import run, same
from tests.support.slices import THREE
from tests.support.visits import visit

WIDTHS = Widths(widths=(1.0, 0.66, 0.4), nested=True)
ONE, TWO = {"w": torch.tensor([True, True, False])}, {"w": torch.tensor([True, False, False])}
FAN = (
    *THREE,
    "method=fedfan",
    "method.widths=[1.0,0.66,0.4]",
    "method.reach=0.5",
    "method.nested=true",
)


def test_every_second_step_trains_a_corner_and_a_narrow_model_its_own_ones():
    assert cycle([ONE, TWO], 2) == [None, ONE, None, TWO]
    assert cycle([TWO], 2) == [None, None, None, TWO]


def test_which_corners_a_model_has():
    nested = Nested(WIDTHS)
    assert nested.corners(FULL) == [Size(0.66), Size(0.4)]
    assert nested.corners(Size(0.66)) == [Size(0.4)]
    assert nested.corners(Size(0.4)) == []
    assert Nested(WIDTHS.model_copy(update={"nested": False})).corners(FULL) == []
    whole = Nested(WIDTHS.model_copy(update={"whole": 2}))
    assert whole.corners(Size(0.66, 2)) == [Size(0.4, 2)]


class Hidden(nn.Module):
    """Scores of x: two hidden channels with batch normalisation, no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (batch, 2)."""
        scores: torch.Tensor = self.last(self.norm(self.first(x)))
        return scores


MASKS = {
    "first.weight": torch.tensor([[True], [False]]),
    "norm.weight": torch.tensor([True, False]),
    "norm.bias": torch.tensor([True, False]),
    "last.weight": torch.tensor([[True, False], [True, False]]),
}


def visit_of(net, x, y):
    own = {name: p.detach().clone() for name, p in net.params.items()}
    return visit(net, 0, len(y), params=own, inputs=Inputs(x), y=y, classes=2, lr=0.5, corners=[MASKS])


def two_steps(monkeypatch, steps="in_turn", **changes):
    """Train two steps, the second one of the corner with the first hidden channel; return the models after both."""
    torch.manual_seed(3)
    net = ModuleNet(Hidden(), torch.device("cpu"))
    nested = Nested(Widths(widths=(1.0, 0.5), nested=True, nested_steps=steps))
    x, y = torch.tensor([[1.0], [2.0], [4.0], [-1.0]]), torch.tensor([0, 1, 1, 0])
    own = visit_of(net, x, y)
    prepared = nested.prepare(own)
    models = []

    def noted(net, params, buffers, batch, prepared):
        models.append({n: t.detach().clone() for n, t in {**net.params, **net.buffers}.items()})
        return Nested.loss(nested, net, params, buffers, batch, prepared)

    monkeypatch.setattr(nested, "loss", noted)
    settings = Train(**{"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "epochs": 2, "batch": 4, **changes})
    train(net, nested, own, prepared, settings)
    models.append({n: t.detach().clone() for n, t in {**net.params, **net.buffers}.items()})
    return models


def test_a_step_of_a_corner_trains_nothing_else_and_leaves_the_statistics(monkeypatch):
    start, first, second = two_steps(monkeypatch)
    assert not torch.equal(first["norm.running_mean"], start["norm.running_mean"])
    assert not torch.equal(first["first.weight"][1], start["first.weight"][1])
    for name, now in second.items():
        if name in MASKS:
            assert torch.equal(now[~MASKS[name]], first[name][~MASKS[name]]), name
            assert not torch.equal(now[MASKS[name]], first[name][MASKS[name]]) or name == "first.weight", name
        elif "running" in name or "tracked" in name:
            assert torch.equal(now, first[name]), name
    assert not torch.equal(second["last.bias"], first["last.bias"])  # no width cuts it


def test_the_corners_loss_is_that_of_the_slice():
    """One hidden channel alone: the slice as a network of its own gives the same loss and the same gradient."""
    torch.manual_seed(5)
    module = Hidden()
    net = ModuleNet(module, torch.device("cpu"))
    small = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 2))
    with torch.no_grad():
        small[0].weight.copy_(net.params["first.weight"][:1])
        small[2].weight.copy_(net.params["last.weight"][:, :1])
        small[2].bias.copy_(net.params["last.bias"])
    nested = Nested(Widths(widths=(1.0, 0.5), nested=True))
    x, y = torch.tensor([[1.0], [2.0], [4.0], [-1.0]]), torch.tensor([0, 1, 1, 0])
    nested.prepare(visit_of(net, x, y))
    net.gradient.zero_()
    loss = nested.loss(net, net.params, net.buffers, Batch(x, y, step=1), {})
    loss.backward()
    expected = nn.functional.cross_entropy(small(x), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    grads = {name: p.grad for name, p in net.params.items()}
    np.testing.assert_allclose(grads["last.weight"][:, :1], small[2].weight.grad, atol=1e-6)
    np.testing.assert_allclose(grads["last.weight"][:, 1:], 0)
    np.testing.assert_allclose(grads["last.bias"], small[2].bias.grad, atol=1e-6)


OTHER = {name: ~mask if mask.ndim < 2 or name == "first.weight" else mask[:, [1, 0]] for name, mask in MASKS.items()}


@pytest.mark.parametrize("corners", [[MASKS], [MASKS, OTHER], [{}, OTHER]], ids=["one", "two", "cuts-nothing"])
def test_a_step_of_all_adds_the_gradients_of_the_whole_and_of_every_corner(corners):
    """The sum of all gradients, and the statistics of the whole model's forward pass alone."""
    x, y = torch.tensor([[1.0], [2.0], [4.0], [-1.0]]), torch.tensor([0, 1, 1, 0])

    def gradients(corners, number, **settings):
        torch.manual_seed(5)
        net = ModuleNet(Hidden(), torch.device("cpu"))
        nested = Nested(Widths(widths=(1.0, 0.5), nested=True, **settings))
        nested.prepare(dataclasses.replace(visit_of(net, x, y), corners=corners))
        net.gradient.zero_()
        loss = nested.loss(net, net.params, net.buffers, Batch(x, y, step=number), {})
        loss.backward()
        return net.gradient.clone(), loss.item(), {name: buffer.clone() for name, buffer in net.buffers.items()}

    whole, own, statistics = gradients([MASKS], 0)
    parts = [gradients([mask], 1)[:2] for mask in corners if mask]
    for number in (0, 1, torch.tensor(1)):
        found, loss, after = gradients(corners, number, nested_steps="all")
        np.testing.assert_allclose(found, whole + sum(part for part, _ in parts), atol=1e-6)
        assert loss == pytest.approx(own + sum(part for _, part in parts))
        assert all(torch.equal(after[name], statistics[name]) for name in statistics)


@pytest.mark.parametrize("steps", ["in_turn", "all"])
def test_a_recorded_step_looks_up_the_same_corner(monkeypatch, steps):
    """Steps as tensors, as in a CUDA graph: the same models, statistics included."""
    plain = two_steps(monkeypatch, steps)
    loss = Nested.loss

    def recorded(self, net, params, buffers, batch, prepared):
        return loss(self, net, params, buffers, batch._replace(step=torch.tensor(batch.step)), prepared)

    monkeypatch.setattr(Nested, "loss", recorded)
    for one, other in zip(plain, two_steps(monkeypatch, steps), strict=True):
        assert same({n: t.numpy() for n, t in one.items()}, {n: t.numpy() for n, t in other.items()})


def test_a_corner_keeps_what_is_not_cut():
    params = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([4.0])}
    cut = corner(params, TWO)
    assert cut["w"].tolist() == [1, 0, 0]
    assert cut["b"] is params["b"]


def test_a_table_has_ones_where_a_corner_cuts_nothing():
    whole, rows = table([None, {"v": ONE["w"]}, None, TWO])
    assert whole.tolist() == [True, False, True, False]
    assert rows["v"].tolist() == [[True] * 3, [True, True, False], [True] * 3, [True] * 3]
    assert rows["w"].tolist() == [[True] * 3] * 3 + [[True, False, False]]


def test_corners_that_cut_nothing_are_none():
    nested = Nested(Widths(widths=(1.0, 0.5), nested=True))
    net = ModuleNet(Hidden(), torch.device("cpu"))
    own = visit_of(net, torch.ones(2, 1), torch.tensor([0, 1]))
    nested.prepare(dataclasses.replace(own, corners=[{}]))
    assert nested._masks == {}


def test_a_model_without_corners_is_trained_as_ever(tmp_path):
    """Nothing but wide models: the option changes no bit."""
    settings = (*THREE[:2], "train.lr=0.1", "method=fedfan", "method.widths=[1.0]")
    plain = run(tmp_path / "plain", *settings)
    nested = run(tmp_path / "nested", *settings, "method.nested=true")
    assert same(plain.method.global_model(), nested.method.global_model())


@pytest.mark.parametrize("corners", [[], [{}]], ids=["no-corner", "cuts-nothing"])
@pytest.mark.parametrize("step", [0, torch.tensor(0)], ids=["plain", "recorded"])
def test_a_step_of_all_without_a_corner_trains_the_whole_model(corners, step):
    """The same loss and gradient as without nested training."""
    x, y = torch.tensor([[1.0], [2.0], [4.0], [-1.0]]), torch.tensor([0, 1, 1, 0])
    losses = []
    for objective in (Nested(WIDTHS.model_copy(update={"nested_steps": "all"})), Nested(Widths())):
        torch.manual_seed(5)
        net = ModuleNet(Hidden(), torch.device("cpu"))
        objective.prepare(dataclasses.replace(visit_of(net, x, y), corners=corners))
        net.gradient.zero_()
        loss = objective.loss(net, net.params, net.buffers, Batch(x, y, step=step), {})
        loss.backward()
        losses.append((loss.item(), net.gradient.tolist(), net.buffers["norm.running_mean"].tolist()))
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["in_turn", "all"])
def test_the_batched_engine_trains_the_same_corners(tmp_path, steps):
    own = (*FAN, f"method.nested_steps={steps}")
    one = run(tmp_path / "local", *own)
    other = run(tmp_path / "batched", *own, "engine=batched")
    plain = run(tmp_path / "plain", *FAN[:-1])  # not nested
    for size, model in one.method.slice_models().items():
        for name, array in model.items():
            np.testing.assert_allclose(other.method.slice_models()[size][name], array, rtol=1e-4, atol=1e-5)
    assert not same(one.method.global_model(), plain.method.global_model())
