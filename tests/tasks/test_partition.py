"""Partitions: every procedure, by hand on tiny tasks and as properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.base import Examples, Partition, Task
from tasks.errors import DataError
from tasks.partition import dirichlet, iid
from tasks.reading.params import token_ids


def toy(labels, classes=10, users=None, test_labels=None, test_users=None, x=None, test_x=None) -> Task:
    y = np.asarray(labels, np.int64)
    y_test = np.asarray([0] if test_labels is None else test_labels, np.int64)
    return Task(
        name="toy",
        train=Examples(np.zeros((len(y), 1), np.uint8) if x is None else x, y, users),
        test=Examples(np.zeros((len(y_test), 1), np.uint8) if test_x is None else test_x, y_test, test_users),
        classes=classes,
        shape=(1,),
        prepare=token_ids,
    )


def is_disjoint_cover(partition: Partition, n: int) -> bool:
    return sorted(np.concatenate(partition.train).tolist()) == list(range(n))


@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 2**31))
def test_iid_deals_equal_sets(clients, more, seed):
    n = clients + more
    partition = iid.split(iid.Params(clients=clients), toy([0] * n), seed)
    sizes = [len(part) for part in partition.train]
    assert is_disjoint_cover(partition, n)
    assert max(sizes) - min(sizes) <= 1


def test_same_seed_same_partition_other_seed_another():
    task = toy(np.arange(200) % 10)
    for module, params in (
        (iid, iid.Params(clients=4)),
        (dirichlet, dirichlet.Params(clients=4, beta=1.0, min_size=1)),
    ):
        a, b, c = (module.split(params, task, seed) for seed in (7, 7, 8))
        assert all(np.array_equal(p, q) for p, q in zip(a.train, b.train))
        assert not all(np.array_equal(p, q) for p, q in zip(a.train, c.train))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.sampled_from([0.3, 1.0, 100.0]), st.integers(0, 1000))
def test_dirichlet_covers_and_keeps_the_minimum(clients, beta, seed):
    task = toy(np.arange(600) % 10)
    partition = dirichlet.split(dirichlet.Params(clients=clients, beta=beta, min_size=5), task, seed)
    assert is_disjoint_cover(partition, 600)
    assert min(len(part) for part in partition.train) >= 5


def test_dirichlet_large_beta_is_nearly_even_and_small_beta_is_skewed():
    task = toy(np.arange(5000) % 10)

    def largest_share(beta):
        partition = dirichlet.split(dirichlet.Params(clients=10, beta=beta), task, 3)
        counts = np.array([np.bincount(task.train.y[part], minlength=10) for part in partition.train])
        return float(np.mean(counts.max(axis=1) / counts.sum(axis=1)))

    assert largest_share(1e6) < 0.11  # an even client holds one tenth of each class
    assert largest_share(0.1) > 0.4


class _Scripted:
    """A generator whose draws are given: identity permutations, and these Dirichlet rows in turn."""

    def __init__(self, rows):
        self.rows = list(rows)

    def permutation(self, items):
        return np.array(items)

    def dirichlet(self, concentration):
        assert concentration.tolist() == [0.5] * 3
        return np.array(self.rows.pop(0))


def test_dirichlet_capacity_rule_by_hand():
    # 12 examples, 3 clients: capacity 12 / 3 = 4.
    # Class 0 (ids 0..5), p = (.7, .2, .1): cuts floor(4.2, 5.4) = 4, 5 -> sizes 4, 1, 1. Client 0 is full.
    # Class 1 (ids 6..11), p = (.5, .25, .25) -> (0, .25, .25) -> (0, .5, .5): cuts floor(0, 3) -> 0, 3, 3.
    members = [np.arange(6), np.arange(6, 12)]
    parts = dirichlet._draw(members, 3, 0.5, _Scripted([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 6, 7, 8], [5, 9, 10, 11]]


def test_dirichlet_draw_without_room_is_refused():
    # All of p sits on the client that is full after class 0: nothing can be renormalised, so the draw is repeated.
    members = [np.arange(6), np.arange(6, 12)]
    assert dirichlet._draw(members, 3, 0.5, _Scripted([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])) is None


def test_dirichlet_gives_up_with_a_clear_error():
    task = toy([0] * 40, classes=1)
    with pytest.raises(DataError, match=r"20 draws with beta=0\.01 .* 10 clients with at least 4 each \(best: \d\)"):
        dirichlet.split(dirichlet.Params(clients=10, beta=0.01, min_size=4, max_draws=20), task, 0)


def test_too_many_clients_is_found_before_drawing():
    with pytest.raises(DataError, match="10 clients with at least 5 examples each need 50, but there are 40"):
        dirichlet.split(dirichlet.Params(clients=10, min_size=5), toy([0] * 40), 0)
    with pytest.raises(DataError, match="need 41, but there are 40"):
        iid.split(iid.Params(clients=41), toy([0] * 40), 0)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"beta": -1.0}, {"clients": 0}, {"min_size": 0}, {"beta": np.nan}])
def test_dirichlet_settings_are_checked(wrong):
    with pytest.raises(ValueError):
        dirichlet.Params(**{"clients": 3, **wrong})
