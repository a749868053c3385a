"""FedMut: slots around the mean, along its last step."""

import numpy as np
import pytest

from fedcross.strategies.fedmut import FedMut, mutations
from fedcross.strategies.method import Round
from tests.support.federation import same
from tests.support.pools import begun, draws, feed, model

ROUND = Round(4, 0, (), 3)


def one(values):
    """Models with a single parameter."""
    return {slot: {"w": np.float32([value])} for slot, value in enumerate(values)}


def test_two_rounds_by_hand():
    """K = 2, rho = 2, a_r = .5, T_b = 2. Start 1; round 1: uploads 2 and 4, w = 3, D = 2, r = .5: 3 + 4 = 7, 3 - 2 = 1.

    Round 2: uploads 5 and 7, w = 6, D = 3, r = .25: 6 + 6 = 12 and 6 - 4.5 = 1.5. Round 3, r = 0: 9 + 6 = 15 and 3.
    """
    start = {"w": np.float32([1.0])}
    method = begun(FedMut, 2, start, radius=2.0, acceleration=0.5, acceleration_rounds=2)
    for number, sent, slots in ((1, (2, 4), [1, 7]), (2, (5, 7), [1.5, 12]), (3, (8, 10), [3, 15])):
        feed(method, number, one(sent))
        assert sorted(method.pool.rows.ravel().tolist()) == slots
        assert method.global_model()["w"] == np.mean(sent)


def test_half_of_the_slots_go_each_way_in_every_entry():
    factors = mutations(200, 6, 0.3, ROUND)
    assert (np.sort(factors, axis=1) == [-0.7, -0.7, -0.7, 1, 1, 1]).all()
    assert len({tuple(row) for row in factors}) == 20  # all ways to choose three of six slots
    odd = mutations(50, 5, 0.0, ROUND)
    assert (odd[:, 4] == 0).all()
    assert (np.sort(odd[:, :4], axis=1) == [-1, -1, 1, 1]).all()
    assert (factors != mutations(200, 6, 0.3, Round(5, 0, (), 3))).any()


@pytest.mark.parametrize("k", [2, 6])
def test_without_acceleration_the_slots_of_an_even_pool_average_to_the_mean(k):
    method = begun(FedMut, k, acceleration=0.0)
    for number in (1, 2):
        feed(method, number, draws(k, number))
    mean, pool = method.global_model(), method.pool.mean()
    for name in mean:
        np.testing.assert_allclose(pool[name], mean[name], rtol=0, atol=2e-6)
    assert method.pool.rows.std(axis=0).min() > 0


def test_each_entry_is_one_of_two_values_and_counters_are_the_means():
    method = begun(FedMut, 4)
    feed(method, 1, {slot: model(float(slot), count=slot) for slot in range(4)})
    # The mean of 0..3 is 1.5, and so is D from 0: 1.5 + 4 * 1.5 = 7.5 and 1.5 - .7 * 6 = -2.7.
    for name, base in (("w0", 0), ("mean", 0)):
        found = np.array([method.pool.model(slot)[name][0] for slot in range(4)])
        assert sorted(found) == pytest.approx([base - 2.7, base - 2.7, base + 7.5, base + 7.5])
    assert [int(method.pool.model(slot)["n"]) for slot in range(4)] == [1] * 4  # 6/4 truncated
    assert method.global_model()["n"] == 1


def test_statistics_may_stay_the_means():
    method = begun(FedMut, 4, part="parameters")
    feed(method, 1, {slot: model(float(slot)) for slot in range(4)})
    assert [float(method.pool.model(slot)["mean"][0]) for slot in range(4)] == [1.5] * 4
    assert {float(method.pool.model(slot)["w0"][0]) for slot in range(4)} != {1.5}


def test_the_last_slot_of_an_odd_pool_is_the_mean():
    method = begun(FedMut, 3)
    feed(method, 1, draws(3, 1))
    assert same(method.pool.model(2), method.global_model())


def test_a_lost_slot_gets_a_mutation_of_the_others_mean():
    method = begun(FedMut, 2, {"w": np.float32([0.0])}, acceleration=0.0, radius=1.0)
    feed(method, 1, {1: {"w": np.float32([3.0])}})
    assert method.global_model()["w"] == 3
    assert sorted(method.pool.rows.ravel().tolist()) == [0, 6]
