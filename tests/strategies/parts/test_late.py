"""The last part of a run: which rounds join the average, and the learning rate there."""

import pytest

from fedcross.strategies.parts.late import Swa, first_late


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
