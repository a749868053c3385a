"""Widths: shapes by hand, corners of the full network, and what a narrow network computes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.tasks.models import corners, create
from fedcross.tasks.models.weights import arrays_of
from fedcross.tasks.models.width import FULL, Width, kept

IMAGES = SimpleNamespace(name="images", shape=(3, 32, 32), classes=10, vocabulary=0)
FEMNIST = SimpleNamespace(name="femnist", shape=(1, 28, 28), classes=62, vocabulary=0)
SMALL = SimpleNamespace(name="small", shape=(1, 8, 8), classes=5, vocabulary=0)
TEXT = SimpleNamespace(name="text", shape=(6,), classes=12, vocabulary=12)
#: model, settings, task, channels of its hidden dimensions
MODELS = [
    ("lenet5", {}, IMAGES, [6, 16, 120, 84]),
    ("mlp", {"hidden": [10, 7]}, SMALL, [10, 7]),
    ("cnn_femnist", {}, FEMNIST, [16, 32, 256]),
    ("cnn_w", {}, IMAGES, [32, 64, 512]),
    ("cnn_fedavg", {}, IMAGES, [32, 64, 512]),
    ("vgg_femnist", {}, FEMNIST, [64, 64, 128, 256, 512, 256]),
    ("fedfusion_cifar", {}, IMAGES, [64, 64, 384, 192]),
    ("fedfusion_mnist", {}, FEMNIST, [32, 64, 512]),
    ("resnet20", {}, IMAGES, [16] * 4 + [32] * 4 + [64] * 4),
    ("resnet20_lab", {"final_norm": True}, IMAGES, [16, 16, 16, 64, 16, 16, 32, 32, 128, 32, 32, 64, 64, 256, 64, 64]),
    ("resnet18", {"stem": "authors"}, IMAGES, [64] * 3 + [128] * 3 + [256] * 3 + [512] * 5),
    ("lstm", {"dropout": 0.5}, TEXT, [8, 256]),
    ("lstm_sent140", {"embedding": 10, "hidden": 12}, TEXT, [10, 12, 128]),
]


def inputs_of(task):
    if task.vocabulary:
        return torch.arange(3 * task.shape[0]).reshape(3, -1) % task.vocabulary
    return torch.randn(3, *task.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "task", "hidden"), MODELS, ids=[one[0] for one in MODELS])
def test_a_narrow_network_computes_what_the_full_one_does_without_the_cut_channels(name, settings, task, hidden):
    full, found = create(name, settings, task, 1), corners(name, settings, task)
    assert list(found.hidden) == hidden
    for layer in full.modules():  # statistics that a mistake would not leave alone
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean)
            nn.init.uniform_(layer.bias)
    for width in (Width(0.66), Width(0.4)):
        narrow, corner = create(name, settings, task, 1, width), found.corner(arrays_of(full), width)
        assert {n: a.shape for n, a in arrays_of(narrow).items()} == dict(found.shapes(width))
        narrow.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in corner.items()})
        masked = {}
        for entry, tensor in full.state_dict().items():
            masked[entry] = tensor.clone()
            if found.cuts(entry, width):
                masked[entry].zero_()[found.index(entry, width)] = torch.from_numpy(corner[entry])
        expected = torch.func.functional_call(full.eval(), masked, inputs_of(task))
        torch.testing.assert_close(narrow.eval()(inputs_of(task)), expected, atol=1e-5, rtol=1e-4)
        narrow.train()(inputs_of(task)).sum().backward()


@pytest.mark.parametrize(("name", "settings", "task"), [one[:3] for one in MODELS], ids=[one[0] for one in MODELS])
def test_initial_weights_are_the_corner_of_the_full_networks(name, settings, task):
    full, width = create(name, settings, task, 1), Width(0.4, 2)
    corner = corners(name, settings, task).corner(arrays_of(full), width)
    narrow = arrays_of(create(name, settings, task, 1, width))
    assert list(narrow) == list(corner)
    assert all((narrow[entry] == array).all() for entry, array in corner.items())


def test_the_gates_of_an_lstm_keep_the_first_units_of_each():
    found = corners("lstm_sent140", {"embedding": 4, "hidden": 5}, TEXT)
    rows = found.index("features.lstm.weight_hh_l1", Width(0.4))[0].ravel()
    assert rows.tolist() == [0, 1, 5, 6, 10, 11, 15, 16]


def test_lenet_5_by_hand():
    """ceil(.4 * 6) = 3, ceil(6.4) = 7, 48, ceil(33.6) = 34; a flattened channel has 25 positions."""
    found = corners("lenet5", {}, IMAGES)
    shapes = {name: shape for name, shape in found.shapes(Width(0.4)).items() if name.endswith("weight")}
    assert shapes == {
        "features.extractor.0.weight": (3, 3, 5, 5),
        "features.extractor.3.weight": (7, 3, 5, 5),
        "features.fc1.weight": (48, 7 * 25),
        "features.fc2.weight": (34, 48),
        "classifier.weight": (10, 34),
    }
    assert found.scaled == ("features.extractor.0", "features.extractor.3", "features.fc1", "features.fc2")
    assert found.shape("features.extractor.3.weight", Width(0.4, 2)) == (16, 6, 5, 5)  # AdaptiveFL's start
    assert found.shape("features.fc1.weight", Width(0.4, 2)) == (48, 400)
    assert not any(found.cuts(name, FULL) for name in found.shapes(FULL))
    assert corners("resnet20", {}, IMAGES).scaled == ()  # batch norm


class Own(nn.Module):
    def __init__(self, classes: int, width: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, kept(10, width)), nn.Linear(kept(10, width), classes)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)).relu())


class Fixed(nn.Linear):
    def __init__(self, classes: int, width: int = 3) -> None:
        super().__init__(64, classes)

    def forward(self, x):
        return super().forward(x.flatten(1))


def test_a_network_of_ones_own_takes_part_if_it_has_a_width(monkeypatch):
    monkeypatch.setitem(sys.modules, "ownwidth", SimpleNamespace(Own=Own, Fixed=Fixed))
    found = corners("own", {"path": "ownwidth:Own"}, SMALL)
    assert found.shapes(Width(0.5))["last.weight"] == (5, 5)
    pictures = SimpleNamespace(name="pictures", shape=(1, 32, 32), classes=5, vocabulary=0)
    for name, settings, task in (("own", {"path": "ownwidth:Fixed"}, SMALL), ("torchvision", {}, pictures)):
        with pytest.raises(ConfigError, match="one width"):
            create(name, settings, task, 1, Width(0.5))


def test_rounding_errors_add_no_channel():
    assert 0.07 * 100 > 7
    assert [kept(100, 0.07), kept(10, 0.66), kept(6, 0.5), kept(3, 0.01)] == [7, 7, 3, 1]
