import math

import pytest
import torch

from fedcross.strategies.fedprox import FedProx, Proximal
from tests.support.bench import play, two_layers


def sigmoid(a):
    return 1 / (1 + math.exp(-a))


def test_two_steps_by_hand():
    """One weight u, logits (u x, -u x), so p_0 = sigmoid(2 u x).

    With s = 1 for label 0 and -1 for label 1 the gradient of the cross-entropy in u's row is -s x sigmoid(-2 s u x),
    and the row of -u moves by the opposite. The proximal term adds mu (u - G), and G = 0:
    u1 = lr s x / 2 and u2 = u1 + lr (s x sigmoid(-2 s u1 x) - mu u1).
    Client 0 has x = 1, label 0, three times; client 1 has x = 2, label 1, once: G' = (3 u(0) + u(1)) / 4.
    """
    lr, mu = 0.5, 0.4
    expected = []
    for s, x in ((1, 1.0), (-1, 2.0)):
        u1 = lr * s * x / 2
        expected.append(u1 + lr * (s * x * sigmoid(-2 * s * u1 * x) - mu * u1))
    data = [([[1.0]] * 3, [0] * 3), ([[2.0]], [1])]
    method, kept, uploads = play("fedprox", two_layers(None, [[0.0], [0.0]]), data, mu=mu)
    assert [u["classifier.weight"][0, 0] for u in uploads] == pytest.approx(expected, abs=1e-15)
    assert expected[0] == pytest.approx(0.25 + 0.5 * (sigmoid(-0.5) - 0.1))
    mean = (3 * expected[0] + expected[1]) / 4
    assert method.global_model()["classifier.weight"][:, 0] == pytest.approx([mean, -mean], abs=1e-15)
    assert kept == {}


def test_the_term_pulls_back_to_the_received_model():
    """From G = 1 at u = 3 with mu = .5 the added gradient is .5 (3 - 1) = 1."""
    prepared = {"anchor": torch.tensor([1.0])}
    assert Proximal(FedProx.Params(mu=0.5)).gradient(torch.tensor([3.0]), prepared) == torch.tensor([1.0])
