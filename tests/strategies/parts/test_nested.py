"""Nested training: which steps train which corner, by hand, and the same in the sequential and the batched trainer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client.batched.trainer import train_batched
from fedcross.client.corner import Corner
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.strategies.objective import Batch
from fedcross.strategies.parts.widths import Nested, Widths
from fedcross.tasks.models.width import FULL, Width
from tests.support import visits as v
from tests.support.federation import run, same
from tests.support.slices import THREE

CPU = torch.device("cpu")
WIDTHS = Widths(widths=(1.0, 0.66, 0.4), nested=True)
ALL = WIDTHS.model_copy(update={"nested_steps": "all"})
FAN = (
    *THREE,
    "method=fedfan",
    "method.widths=[1.0,0.66,0.4]",
    "method.reach=0.5",
    "method.nested=true",
)


def test_every_second_step_trains_a_corner_and_a_narrow_model_its_own_ones():
    nested = Nested(WIDTHS)
    wide, medium, narrow = (
        SimpleNamespace(corners=["medium", "narrow"]),
        SimpleNamespace(corners=["narrow"]),
        SimpleNamespace(corners=[]),
    )
    assert [nested._turn(wide, step) for step in range(6)] == [wide, "medium", wide, "narrow", wide, "medium"]
    assert [nested._turn(medium, step) for step in range(6)] == [medium, medium, medium, "narrow", medium, medium]
    assert [nested._turn(narrow, step) for step in range(4)] == [narrow] * 4


def test_which_corners_a_model_has():
    nested = Nested(WIDTHS)
    assert nested.corners(FULL) == [Width(0.66), Width(0.4)]
    assert nested.corners(Width(0.66)) == [Width(0.4)]
    assert nested.corners(Width(0.4)) == []
    whole = Nested(WIDTHS.model_copy(update={"whole": 2}))
    assert whole.corners(Width(0.66, 2)) == [Width(0.4, 2)]


class Hidden(nn.Module):
    """Scores of x: hidden channels with batch normalisation, no activation."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(1, channels, bias=False), nn.BatchNorm1d(channels)
        self.last = nn.Linear(channels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (batch, 2)."""
        scores: torch.Tensor = self.last(self.norm(self.first(x)))
        return scores


X, Y = torch.tensor([[1.0], [2.0], [4.0], [-1.0]]), torch.tensor([0, 1, 1, 0])
NORM = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]


def corner(net, channels):
    """Return the corner with these hidden channels of a network of `wide` ones."""
    axis, whole = np.array(channels), np.arange(2)
    places = {"first.weight": [axis, np.arange(1)], "last.weight": [whole, axis], **{name: [axis] for name in NORM}}
    return Corner(ModuleNet(Hidden(len(channels)), CPU), net, places)


def hidden(*corners):
    """Return a network with two hidden channels and corners with these channels."""
    torch.manual_seed(5)
    net = ModuleNet(Hidden(), CPU)
    net.corners = [corner(net, channels) for channels in corners]
    return net


def slice_of(net, channel):
    """Return one hidden channel of `net` as a network of its own."""
    small = Hidden(1)
    with torch.no_grad():
        small.first.weight.copy_(net.params["first.weight"][[channel]])
        small.last.weight.copy_(net.params["last.weight"][:, [channel]])
        small.last.bias.copy_(net.params["last.bias"])
    return small


def gradients(net, nested, step=0):
    """Return the gradients, by name, and the loss of a step."""
    net.gradient.zero_()
    loss = nested.loss(net, net.params, net.buffers, Batch(X, Y, step=step), {})
    loss.backward()
    return {name: p.grad.clone() for name, p in net.params.items()}, loss.item()


def state(net):
    return {n: t.detach().numpy().copy() for n, t in {**net.params, **net.buffers}.items()}


@pytest.mark.parametrize("channel", [0, 1], ids=["the-first", "a-later-one"])
def test_a_corners_step_is_that_of_the_slice(channel):
    """One hidden channel alone, as a network of its own: the same loss and gradients; nothing for the other channel."""
    net = hidden([channel])
    small = slice_of(net, channel)
    before = state(net)
    found, loss = gradients(net, Nested(Widths(widths=(1.0, 0.5), nested=True)), step=1)
    expected = nn.functional.cross_entropy(small(X), Y)
    expected.backward()
    assert loss == expected.item()
    assert torch.equal(found["first.weight"][channel], small.first.weight.grad[0])
    assert torch.equal(found["norm.weight"][channel], small.norm.weight.grad[0])
    assert torch.equal(found["last.weight"][:, channel], small.last.weight.grad[:, 0])
    assert torch.equal(found["last.bias"], small.last.bias.grad)
    assert not found["last.weight"][:, 1 - channel].any()
    assert not found["norm.bias"][1 - channel].any()
    assert same(before, state(net))  # statistics too


@pytest.mark.parametrize("channels", [[[0]], [[0], [1]], [[0, 1], [0]]], ids=["one", "two", "one-cuts-nothing"])
def test_a_step_of_all_adds_the_gradients_of_the_whole_and_of_every_corner(channels):
    """The sum of all gradients and losses, and the statistics of the whole model's forward pass alone."""
    turns = Nested(Widths(widths=(1.0, 0.5), nested=True))
    whole = hidden()
    parts = [gradients(whole, turns), *(gradients(hidden(one), turns, step=1) for one in channels)]
    for step in (0, 1, torch.tensor(1)):
        net = hidden(*channels)
        found, loss = gradients(net, Nested(ALL), step)
        for name, slope in found.items():
            np.testing.assert_allclose(slope, sum(part[name] for part, _ in parts), atol=1e-6)
        assert loss == pytest.approx(sum(loss for _, loss in parts))
        for name, buffer in net.buffers.items():
            assert torch.equal(buffer, whole.buffers[name]), name


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("steps", ["in_turn", "all"])
def test_both_trainers_drop_the_same_elements_in_a_corner(steps, norm):
    """A corner's pass moves the states of dropout layers on, whichever network they are in."""
    net, small = v.small_net(dropout=True, norm=norm), v.small_net(dropout=True, norm=norm, hidden=4)
    first, every = np.arange(4), np.arange(3)
    hidden = next(name for name, p in net.params.items() if p.shape == (8, 16)).removesuffix(".weight")
    places = {
        f"{hidden}.weight": [first, np.arange(16)],
        f"{hidden}.bias": [first],
        "classifier.weight": [every, first],
    }
    net.corners = [Corner(small, net, places)]
    nested = Nested(Widths(widths=(1.0, 0.5), nested=True, nested_steps=steps))
    works = [v.work(net, nested, v.visit(net, client, 10)) for client in range(2)]
    together = train_batched(net, nested, works, v.settings(epochs=3))
    for one, work in zip(together, works, strict=True):
        v.enter(net, work.visit)
        alone = train(net, nested, work.visit, {}, v.settings(epochs=3))
        torch.testing.assert_close(one.flat, alone.flat, rtol=0, atol=1e-10)
        assert one.loss == pytest.approx(alone.loss)


@pytest.mark.slow
def test_a_model_without_corners_is_trained_as_ever(tmp_path):
    """Nothing but wide models: the option changes no bit."""
    settings = (*THREE[:2], "train.lr=0.1", "method=fedfan", "method.widths=[1.0]")
    plain = run(tmp_path / "plain", *settings)
    nested = run(tmp_path / "nested", *settings, "method.nested=true")
    assert same(plain.driver.global_model(), nested.driver.global_model())


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["in_turn", "all"])
def test_the_batched_engine_trains_the_same_corners(tmp_path, steps):
    own = (*FAN, f"method.nested_steps={steps}")
    one = run(tmp_path / "local", *own)
    other = run(tmp_path / "batched", *own, "engine=batched")
    plain = run(tmp_path / "plain", *FAN[:-1])  # not nested
    for size, model in one.driver.evaluation().widths.items():
        for name, array in model.items():
            np.testing.assert_allclose(other.driver.evaluation().widths[size][name], array, rtol=1e-4, atol=1e-5)
    assert not same(one.driver.global_model(), plain.driver.global_model())
