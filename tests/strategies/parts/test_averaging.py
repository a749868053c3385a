"""Averages by hand: of models, of momentum's steps, of the last rounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.strategies.fedsam import Swa
from fedcross.strategies.parts.averaging import effective_steps, first_late, squared_distance, weighted_mean


def models(*values, dtype=np.float32):
    return [{"w": np.array([value, 2 * value], dtype), "n": np.array(int(value))} for value in values]


def test_by_hand():
    """(1 * 4 + 3 * 8) / 4 = 7, and twice that; the counters 4 and 8 come to 7 as well."""
    ours = models(4, 8)
    mean = weighted_mean(ours, [1, 3])
    assert (mean["w"].tolist(), mean["n"].tolist()) == ([7, 14], 7)
    assert (mean["w"].dtype, mean["n"].dtype) == (np.float32, np.int64)
    assert ours[0]["w"].tolist() == [4, 8]  # the models stay as they are


def test_counters_are_truncated_towards_zero_but_not_by_rounding():
    """(2 + 3) / 2 = 2.5 is 2, and -2.5 is -2. Of six models with 7 each, 7/6 six times is 7 - 9e-16: it is 7."""
    assert weighted_mean(models(2, 3), [1, 1])["n"] == 2
    assert weighted_mean(models(-2, -3), [1, 1])["n"] == -2
    assert sum([7 * (1 / 6)] * 6) < 7
    assert weighted_mean(models(*[7] * 6), [1] * 6)["n"] == 7
    table = weighted_mean([{"n": np.array([[1, 2, 3]])}, {"n": np.array([[2, 4, 6]])}], [1, 1])["n"]
    assert table.tolist() == [[1, 3, 4]]


def test_a_distance_takes_what_is_missing_as_0():
    assert (
        squared_distance({"w": np.float32([3, 5]), "b": np.float32([2])}, {"w": np.float32([3, 1])}, ["w", "b"]) == 20
    )


def test_one_model_and_float64_stay_to_the_bit():
    ours = models(0.1, dtype=np.float64)
    assert weighted_mean(ours, [0.3])["w"].tobytes() == ours[0]["w"].tobytes()


def test_effective_steps_by_hand():
    """Two steps, momentum .5: the first gradient moves the model by 1 + .5, the second by 1; together 2.5."""
    assert effective_steps(2, 0.5) == pytest.approx(2.5)
    assert effective_steps(7, 0.0) == 7


@given(st.integers(1, 60), st.floats(0, 0.95))
def test_effective_steps_is_the_way_of_a_constant_gradient(steps, momentum):
    way = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + 1
        way += speed
    assert effective_steps(steps, momentum) == pytest.approx(way, rel=1e-9)


def test_which_rounds_join_the_average_by_hand():
    """Of 8 rounds the second half begins with 5; the average with the first cycle that is over behind it."""
    assert first_late(8, 0.5) == 5
    assert [number for number in range(1, 9) if Swa(start=0.5, cycle=1).collects(number, 8)] == [6, 7, 8]
    assert [number for number in range(1, 9) if Swa(start=0.5, cycle=2).collects(number, 8)] == [7]


@pytest.mark.parametrize("start", [0.0, 0.29, 0.57, 0.58, 0.7, 0.75, 0.999, 1.0])
@pytest.mark.parametrize("rounds", [100, 1000])
def test_a_share_is_the_decimal_number_that_is_written(rounds, start):
    """.29 of 100 rounds are 29, so the 30th is the first behind; as a product of floats they are 28.999999999999996."""
    thousandths = {0.0: 0, 0.29: 290, 0.57: 570, 0.58: 580, 0.7: 700, 0.75: 750, 0.999: 999, 1.0: 1000}[start]
    assert first_late(rounds, start) == thousandths * rounds // 1000 + 1


def test_the_learning_rate_falls_within_each_cycle():
    """Cycles of 2, from round 3 on: round 3 is halfway from 1 to 0.2, round 4 at 0.2."""
    rates = [Swa(start=0.5, cycle=2, lr=0.2).rate(1.0, number, 4) for number in (1, 2, 3, 4)]
    assert rates == pytest.approx([1, 1, 0.6, 0.2])
    assert Swa(start=0.5, cycle=1, lr=0.2).rate(1.0, 4, 4) == 1
