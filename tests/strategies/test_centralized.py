import math

import numpy as np
import pytest
import torch

from fedcross.client.cache import RunCache
from fedcross.client.request import examples
from fedcross.conf.schema import load
from fedcross.strategies.centralized import Centralized
from fedcross.strategies.method import Round
from fedcross.tasks.base import Examples, Partition, Task
from fedcross.tasks.data import FederatedData
from tests.support.bench import play, two_layers
from tests.support.federation import SMALL
from tests.support.game import Game

CPU = torch.device("cpu")


def data(transform=None):
    """Six examples of one number, x = 0 ... 5, y = x mod 2; clients own (4, 0), (1,) and (2, 3, 5)."""
    x, y = np.arange(6.0, dtype=np.float32)[:, None], np.arange(6) % 2
    task = Task("numbers", Examples(x, y), Examples(x, y), 2, (1,), torch.from_numpy)
    parts = [np.array([4, 0]), np.array([1]), np.array([2, 3, 5])]
    return FederatedData(task, Partition(parts, transform=transform))


def test_the_union_is_everybodys_data():
    x, y = data().union(1.0, np.random.default_rng(0), CPU)
    assert x[:, 0].tolist() == [4, 0, 1, 2, 3, 5]
    assert y.tolist() == [0, 0, 1, 0, 1, 1]


def test_a_share_is_drawn_without_replacement_and_depends_on_the_generator_only():
    draws = [data().union(0.5, np.random.default_rng(seed), CPU)[0][:, 0].tolist() for seed in (1, 1, 2, 3)]
    assert all(len(set(draw)) == 3 for draw in draws)
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) > 1
    assert len(data().union(1e-9, np.random.default_rng(0), CPU)[1]) == 1


def test_the_share_counts_no_client_for_more_than_it_trains_on():
    """Clients own 2, 1 and 3 examples and train on 2 at most: all of that is 2 + 1 + 2 = 5 of the 6."""
    assert len(data().union(1.0, np.random.default_rng(0), CPU, most=2)[1]) == 5


def test_each_client_sees_its_own_transform():
    x, _ = data(lambda client, raw: raw + 10 * client).union(1.0, np.random.default_rng(0), CPU)
    assert x[:, 0].tolist() == [4, 0, 11, 22, 23, 25]


def test_two_steps_on_both_clients_data_by_hand():
    """Clients own (x = 1, label 0) and (x = 2, label 1); logits (u x, -u x), so dCE/du = -s x sigmoid(-2 s u x).

    A full batch of the union has the mean of both gradients: u1 = -.5 (-1/2 + 1) / 2, and once more from there.
    """
    u = 0.0
    for _ in range(2):
        u -= 0.5 * (-1 / (1 + math.exp(2 * u)) + 2 / (1 + math.exp(-4 * u))) / 2
    x, y = np.array([[1.0], [2.0]]), np.array([0, 1])
    task = Task("numbers", Examples(x, y), Examples(x, y), 2, (1,), torch.from_numpy)
    owned = FederatedData(task, Partition([np.array([0]), np.array([1])]))
    inputs, labels = owned.union(1.0, np.random.default_rng(0), CPU)
    method, kept, uploads = play("centralized", two_layers(None, [[0.0], [0.0]]), [(inputs[:], labels)])
    assert method.global_model()["classifier.weight"][0, 0] == pytest.approx(u, abs=1e-15)
    assert -0.125 > u > -0.5
    assert kept == {}
    assert len(uploads) == 1


def test_one_visit_does_the_work_of_all_drawn_clients():
    method = Game(Centralized, {"w": np.zeros(1, np.float32)}, clients_per_round=4)
    clients = method.sample(1, range(16))
    (payload,) = method.dispatch(Round(1, 0, clients, 0))
    assert payload.config == {"pooled-share": 0.25}
    (payload,) = method.dispatch(Round(2, 0, method.sample(2, range(2)), 0))
    assert payload.config == {"pooled-share": 1.0}  # no more than there is


@pytest.mark.slow
def test_every_round_draws_anew():
    shop = RunCache(load([*SMALL, "method=centralized"]))
    draws = [examples(shop, shop.net, 0, r, 0.5) for r in (1, 1, 2)]
    assert [len(y) for _, y in draws] == [100, 100, 100]
    assert torch.equal(draws[0][0][:], draws[1][0][:])
    assert not torch.equal(draws[0][0][:], draws[2][0][:])
