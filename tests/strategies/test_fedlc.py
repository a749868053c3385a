"""FedLC: margins by hand."""

import numpy as np
import pytest
import torch

from fedcross.client.flat_model import ModuleNet
from fedcross.conf.schema import Train
from fedcross.strategies.fedlc import Calibrated, FedLC, FedLCParams
from tests.support.bench import open_visit, play, two_layers
from tests.support.single import arrays, begun, feed


def test_the_margins_by_hand():
    """16 and 1 examples: 2 * 16^(-1/4) = 1 and 2; a class without examples 200 (n_c = 1e-8)."""

    net = ModuleNet(two_layers(None, [[0.0], [0.0], [0.0]]), torch.device("cpu"))
    visit = open_visit(net, [[1.0]] * 17, [0] * 16 + [1])
    prepared = Calibrated(FedLCParams(tau=2.0)).prepare(visit)
    assert prepared["margin"].tolist() == pytest.approx([1, 2, 200])


def test_one_step_by_hand():
    """Zero weights, x = 1, counts 16, 1 and 0, tau = 2: p = softmax(-1, -2, -200), gradient p - (16/17, 1/17, 0).

    A class without examples gets no gradient.
    """

    data = [([[1.0]] * 17, [0] * 16 + [1])]
    local = Train(lr=0.5, epochs=1, batch=100)
    method, _, _ = play("fedlc", two_layers(None, [[0.0]] * 3), data, local=local, tau=2.0)
    p = np.exp([-1.0, -2.0, -200.0]) / np.exp([-1.0, -2.0, -200.0]).sum()
    expected = -0.5 * (p - np.array([16 / 17, 1 / 17, 0]))
    found = method.global_model()["classifier.weight"][:, 0]
    assert found == pytest.approx(expected, abs=1e-14)
    assert abs(found[2]) < 1e-80


def test_statistics_are_averaged():
    method = begun(FedLC)
    feed(method, 1, arrays(2.0, 1.0, 4), arrays(8.0, 4.0, 7), examples=[2, 1])
    model = method.global_model()
    assert (model["w"].tolist(), float(model["mean"][0]), int(model["n"])) == ([4, 4], 2.0, 5)
