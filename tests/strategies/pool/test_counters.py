"""Integer buffers: a value that nobody changes stays, in every family of methods."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fedcross.strategies.fedmut import FedMut
from fedcross.strategies.masterpull import MasterPull
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.pool.mixing import cross, mixed_integers
from fedcross.strategies.pool.pool import Layout, Pool

MODEL = {"w": np.ones(2, np.float32), "n": np.array(-5), "big": np.array(2**40 + 1), "small": np.array([-128], np.int8)}


def same(model):
    for name in ("n", "big", "small"):
        np.testing.assert_array_equal(model[name], MODEL[name])
        assert model[name].dtype == MODEL[name].dtype


def test_pool_mean_and_mixing():
    pool = Pool(Layout.of(MODEL), 3)
    pool.fill(MODEL)
    for _ in range(3):
        pool.mix(cross(3, range(3), [1, 2, 0], 0.99))
    same(pool.mean())
    same(pool.model(1))


@pytest.mark.parametrize("method", [MasterPull(), FedMut()])
def test_methods_of_a_pool(method):
    state = method.init(Start(MODEL, ("w",), clients_per_round=3))
    for number in range(1, 4):
        current = Round(number, 0, (0, 1, 2), 0)
        tasks = method.dispatch(state, current)
        method.aggregate(state, current, [Upload(t.client, t.slot, dict(t.arrays), {}, 1, {}, t) for t in tasks])
    same(method.global_model(state))


@pytest.mark.parametrize(("value", "expected"), [(2.6, 2), (-2.6, -2), (2.9999999, 3), (-2.9999999, -3)])
def test_near_an_integer_is_that_integer_and_else_truncated(value, expected):
    share = value / 10 if value > 0 else -value / 10
    sign = 1 if value > 0 else -1
    assert mixed_integers(np.array([[0], [sign * 10]]), np.array([[1 - share, share]]))[0, 0] == expected


@given(some.integers(-(2**40), 2**40), some.lists(some.floats(0.01, 1), min_size=1, max_size=6))
def test_a_shared_value_stays(value, weights):
    shares = np.array([weights]) / sum(weights)
    assert mixed_integers(np.full((len(weights), 1), value, np.int64), shares)[0, 0] == value
