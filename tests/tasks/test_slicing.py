"""Slices by width: which channels belong together, what a slice computes, and what cannot be sliced."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcross.core.errors import ConfigError
from fedcross.tasks.models import create
from fedcross.tasks.models.slicing import FULL, Plan, Size, cut, plan_of
from fedcross.tasks.models.slicing.labels import Groups, UnsliceableError, reshaped
from fedcross.tasks.models.weights import arrays_of

IMAGES = SimpleNamespace(name="images", shape=(3, 32, 32), classes=10, vocabulary=0)
SMALL = SimpleNamespace(name="small", shape=(2, 8, 8), classes=5, vocabulary=0)
TEXT = SimpleNamespace(name="text", shape=(6,), classes=12, vocabulary=12)

CONFIGURED = [
    ("lenet5", {}, IMAGES, [6, 16, 120, 84]),
    ("mlp", {"hidden": [10, 7]}, SMALL, [10, 7]),
    ("cnn_femnist", {}, SimpleNamespace(name="f", shape=(1, 28, 28), classes=62, vocabulary=0), [16, 32, 256]),
    ("resnet20", {}, IMAGES, [16] * 4 + [32] * 4 + [64] * 4),
    ("lstm", {"dropout": 0.5}, TEXT, [8, 256]),
    ("lstm_sent140", {"embedding": 10, "hidden": 12}, TEXT, [10, 12, 128]),
]


def masked(network, plan, size):
    """The full network with every weight of a cut channel set to zero, in evaluation mode."""
    full = {n: torch.from_numpy(np.array(a)) for n, a in arrays_of(network).items()}
    masks = plan.masks({n: full[n].numpy() for n in plan.entries}, size)
    twin = torch.nn.Module.__new__(type(network))
    twin.__dict__ = {**network.__dict__}
    zeroed = {n: t * torch.from_numpy(masks[n]).to(t.dtype) if n in masks else t for n, t in full.items()}
    return lambda x: torch.func.functional_call(network.eval(), zeroed, x)


def inputs_of(task):
    if task.vocabulary:
        return torch.arange(3 * task.shape[0]).reshape(3, -1) % task.vocabulary
    return torch.randn(3, *task.shape, generator=torch.Generator().manual_seed(3))


def check_forward(network, task, *sizes):
    """Compare each slice with the masked full network, and the gradients' shapes with the slice's."""
    plan, inputs = plan_of(network, task), inputs_of(task)
    for size in sizes:
        small = cut(network, plan, size, task)
        expected = masked(network, plan, size)(inputs)
        torch.testing.assert_close(small.eval()(inputs), expected, atol=1e-5, rtol=1e-4)
        corner = plan.corner(arrays_of(network), size)
        assert {n: a.shape for n, a in corner.items()} == {n: a.shape for n, a in arrays_of(small).items()}
        assert all((corner[n] == a).all() for n, a in arrays_of(small).items())
        small.train()(inputs).sum().backward()
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "task", "groups"), CONFIGURED, ids=[one[0] for one in CONFIGURED])
def test_a_slice_computes_what_the_full_model_does_with_the_cut_channels_at_zero(name, settings, task, groups):
    network = create(name, settings, task, 1)
    for layer in network.modules():  # statistics and slopes that a mistake would not leave alone
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean)
            nn.init.uniform_(layer.bias)
    plan = check_forward(network, task, Size(0.66), Size(0.4))
    assert [group.channels for group in plan.groups] == groups
    assert plan.exact


def test_lenet_5_by_hand():
    """ceil(.4 * 6) = 3, ceil(6.4) = 7, 48, ceil(33.6) = 34; a flattened channel has 25 positions."""
    network = create("lenet5", {}, IMAGES, 1)
    plan = plan_of(network, IMAGES)
    shapes = {n: a.shape for n, a in plan.corner(arrays_of(network), Size(0.4)).items()}
    assert shapes == {
        "features.extractor.0.weight": (3, 3, 5, 5),
        "features.extractor.0.bias": (3,),
        "features.extractor.3.weight": (7, 3, 5, 5),
        "features.extractor.3.bias": (7,),
        "features.fc1.weight": (48, 7 * 25),
        "features.fc1.bias": (48,),
        "features.fc2.weight": (34, 48),
        "features.fc2.bias": (34,),
        "classifier.weight": (10, 34),
        "classifier.bias": (10,),
    }
    assert plan.scaled == ("features.extractor.0", "features.extractor.3", "features.fc1", "features.fc2")
    late = {n: a.shape for n, a in plan.corner(arrays_of(network), Size(0.4, 2)).items()}  # AdaptiveFL's start
    assert late["features.extractor.3.weight"] == (16, 6, 5, 5)
    assert late["features.fc1.weight"] == (48, 400)


def test_the_gates_of_an_lstm_keep_the_first_units_of_each():
    network = create("lstm_sent140", {"embedding": 4, "hidden": 5}, TEXT, 1)
    plan = plan_of(network, TEXT)
    rows = plan.index("features.lstm.weight_hh_l1", Size(0.4))[0].ravel()
    assert rows.tolist() == [0, 1, 5, 6, 10, 11, 15, 16]


def test_width_1_is_the_network_itself():
    network = create("lenet5", {}, IMAGES, 1)
    plan = plan_of(network, IMAGES)
    assert cut(network, plan, FULL) is network
    arrays = arrays_of(network)
    assert all(plan.corner(arrays, FULL)[n] is arrays[n] for n in arrays)


def test_a_plan_travels_as_json():
    network = create("lstm", {}, TEXT, 1)
    plan = plan_of(network, TEXT)
    again = Plan.of_plain(json.loads(json.dumps(plan.plain())))
    assert {n: again.shape(n, Size(0.4)) for n in plan.entries} == {n: plan.shape(n, Size(0.4)) for n in plan.entries}
    assert again.groups == plan.groups


# ---- networks of one's own -------------------------------------------------------------------------------------


class Own(nn.Module):
    """Everything that a user may put together: depthwise, joined, squeezed, grouped, gated, with PReLU."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.left, self.right = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 4, 1)
        self.slope = nn.PReLU(10)
        self.gate = nn.Conv2d(8, 8, 1)
        self.offset = nn.Parameter(torch.randn(10, 1, 1))
        self.hidden = nn.Linear(10 * 16, 9)
        self.last = nn.Linear(9, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.depth(x)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        x = self.slope(torch.cat([self.left(x), self.right(x)], dim=1)) + self.offset
        x = F.max_pool2d(x, 2)
        if x.shape[0] > 10_000:  # a branch of Python's
            raise AssertionError
        return self.last(torch.tanh(self.hidden(x.view(x.size(0), -1))))


class Words(nn.Module):
    """A bidirectional GRU with tied word vectors."""

    def __init__(self, normalised=False):
        super().__init__()
        self.words = nn.Embedding(12, 7)
        self.gru = nn.GRU(7, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(10) if normalised else nn.Identity()
        self.back = nn.Linear(10, 7)
        self.scores = nn.Linear(7, 12, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, x):
        states, _ = self.gru(self.words(x))
        return self.scores(self.back(self.norm(states[:, -1])))


def test_a_network_of_ones_own():
    plan = check_forward(Own(), SMALL, Size(0.7), Size(0.5), Size(0.3))
    assert [(group.channels, group.unit) for group in plan.groups] == [(8, 4), (6, 1), (4, 1), (9, 1)]


def test_recurrent_and_tied():
    network = Words()
    plan = check_forward(network, TEXT, Size(0.5))
    small = cut(network, plan, Size(0.5))
    assert small.scores.weight is small.words.weight
    assert small.words.weight.shape == (12, 4)


class Rows(nn.Module):
    """Scores from the last state of a stack of recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.words, self.states = nn.Embedding(30, 8), kind(8, 10, num_layers=2, batch_first=True, **settings)
        self.scores = nn.Linear(20 if settings else 10, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.states(self.words(x))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("settings", [{}, {"bidirectional": True}], ids=["one-way", "both-ways"])
def test_layers_of_a_recurrent_stack_are_cut_together(kind, settings):
    """torch has one size for all of them: a start, as AdaptiveFL's, lies before or behind the stack."""
    plan = check_forward(Rows(kind, **settings), TEXT, Size(0.5), Size(0.5, 1))
    assert [group.channels for group in plan.groups] == [8, 10]
    assert plan.shape("states.weight_hh_l1", Size(0.5, 1))[1] == 5


def test_a_layer_norm_over_channels_is_sliced_but_is_another_function():
    plan = plan_of(Words(normalised=True), TEXT)
    assert not plan.exact
    small = cut(Words(normalised=True), plan, Size(0.5), TEXT)
    assert small.norm.normalized_shape == (6,)


def test_the_scaler_divides_what_hidden_layers_return():
    network = create("mlp", {"hidden": [4]}, SMALL, 1)
    plan, x = plan_of(network, SMALL), inputs_of(SMALL)
    plain, scaled = cut(network, plan, Size(0.5)), cut(network, plan, Size(0.5), scaler=0.5)
    hidden = F.relu(plain.features.fc1(x.flatten(1)) / 0.5)
    for mode in (True, False):
        torch.testing.assert_close(scaled.train(mode)(x), plain.classifier(hidden))


def test_a_residual_sum_with_the_input_stays_whole():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 2, 1), nn.Linear(128, 5)

        def forward(self, x):
            return self.c((x + self.b(F.relu(self.a(x)))).flatten(1))

    plan = check_forward(Sum(), SMALL, Size(0.5))
    assert [group.channels for group in plan.groups] == [4]


class Layers(nn.Module):
    """One hidden convolution and an operation behind it."""

    def __init__(self, operation):
        super().__init__()
        self.stem, self.operation, self.last = nn.Conv2d(2, 6, 3, padding=1), operation, nn.Linear(6 * 64, 5)

    def forward(self, x):
        return self.last(self.operation(self.stem(x)).flatten(1))


class Call(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (nn.Softmax(1), "Layer operation, softmax: no rule"),
        (nn.Conv2d(6, 6, 3, padding=1, groups=2), "Layer operation, conv2d: 2 groups of channels"),
        (Call(lambda x: x - x.mean(1, keepdim=True)), "mean: it takes a value over all channels"),
        (Call(lambda x: x.view(len(x), 3, 2, 8, 8)), "view: it divides one axis of channels"),
        (Call(lambda x: torch.cat([x[:, :3], x[:, 3:]], 1)), "__getitem__: it picks some of the channels"),
        (Call(lambda x: x + F.pad(x[:, :, :, :], (0, 0, 0, 0, 1, 0))[:, :]), "pad: it adds zero channels"),
        (Call(lambda x: x.reshape(-1, 6 * 64).view(-1, 6, 8, 8)), "it divides"),
        (Call(lambda x: torch.einsum("bchw->bchw", x)), "einsum: no rule"),
    ],
)
def test_what_cannot_be_sliced_says_which_layer_and_why(operation, said):
    with pytest.raises(ConfigError, match="cannot be sliced by width") as caught:
        plan_of(Layers(operation), SMALL)
    assert said in str(caught.value)
    assert str(caught.value).startswith("model Layers cannot")


def test_numbers_of_channels_in_forward_are_found_when_the_slice_is_tried():
    class Fixed(Layers):
        def forward(self, x):
            return self.last(self.stem(x).view(-1, 384))

    fixed = Fixed(nn.Identity())
    plan = plan_of(fixed, SMALL)
    with pytest.raises(ConfigError, match=r"the slice raised RuntimeError.*x.flatten\(1\)"):
        cut(fixed, plan, Size(0.5), SMALL)


def test_a_slice_that_computes_something_else_is_refused():
    class Counting(Layers):
        def forward(self, x):
            x = self.stem(x)
            return self.last((x / x.shape[1]).flatten(1))

    network = Counting(nn.Identity())
    with pytest.raises(ConfigError, match="computes something else"):
        cut(network, plan_of(network, SMALL), Size(0.5), SMALL)


def test_a_network_without_hidden_channels_is_refused():
    with pytest.raises(ConfigError, match="no hidden channels"):
        plan_of(nn.Sequential(nn.Flatten(), nn.Linear(128, 5)), SMALL)


def test_weights_computed_from_others_are_named_as_the_reason():
    hidden = torch.nn.utils.parametrizations.weight_norm(nn.Linear(128, 6))
    network = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(6, 5))
    with pytest.raises(ConfigError, match="Layer 1, parametrization: its weights are computed from other weights"):
        plan_of(network, SMALL)


def test_channels_through_reshapes():
    groups = Groups()
    axis = groups.new(4)
    assert groups.length(reshaped((None, axis, None, None), (2, 4, 3, 5), (2, 60))[1]) == 60
    assert reshaped((None, None, axis), (2, 3, 4), (6, 4)) == (None, axis)
    assert reshaped((None, axis, None, None), (2, 4, 1, 1), (2, 4)) == (None, axis)
    assert reshaped((None, None, axis), (2, 3, 4), (2, 12)) == (None, axis * 3)
    with pytest.raises(UnsliceableError):
        reshaped((None, axis), (2, 4), (2, 2, 2))


def test_a_shortcut_from_a_stage_that_stays_whole_is_refused_with_what_to_do():
    network = create("resnet20", {}, IMAGES, 1)
    plan = plan_of(network, IMAGES)
    cut(network, plan, Size(0.66), IMAGES)
    said = r"width 0\.66@2: .* a group that stays whole; .* method\.whole=0, with AdaptiveFL method\.starts=\[0\]"
    with pytest.raises(ConfigError, match="^this model cannot be sliced.*" + said):  # not by a class nobody named
        cut(network, plan, Size(0.66, 2), IMAGES)


def test_no_weight_that_is_cut_is_copied_whole(monkeypatch):
    """A small device needs room for the full network once and for the slice, not for the full one twice."""
    network, copied, whole_copy = create("lenet5", {}, IMAGES, 1), [], nn.Parameter.__deepcopy__
    plan = plan_of(network, IMAGES)

    def watched(self, memo):
        if id(self) not in memo:
            copied.append(tuple(self.shape))
        return whole_copy(self, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", watched)
    small = cut(network, plan, Size(0.4))
    assert copied == [(10,)]  # the biases of the classes: the one entry that no size cuts
    assert small.classifier.weight.shape == (10, 34)
    assert network.classifier.weight.shape == (10, 84)
