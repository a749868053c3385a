"""IMA: the window by hand."""

import pytest

from fedcross.strategies.ima import IMA, IMAParams, Milder
from fedcross.strategies.method import Round
from tests.support import visits as v
from tests.support.single import arrays, begun, feed


def test_the_window_by_hand():
    """8 rounds, from 50 % on, P = 3: rounds 1 to 4 as FedAvg, then the mean of the last three averages."""
    method, seen = begun(IMA, start=0.5, window=3), []
    for number, value in enumerate((1, 2, 3, 4, 8, 3, 1, 5), start=1):
        feed(method, number, arrays(value - 1.0, mean=value, count=value), arrays(value + 1.0, mean=value, count=value))
        seen.append(float(method.global_model()["w"][0]))
        assert method.dispatch(Round(number + 1, 0, (0,), 0))[0].arrays["w"][0] == seen[-1]
    assert seen == [1, 2, 3, 4, 5, 5, 4, 3]  # (3 + 4 + 8)/3, (4 + 8 + 3)/3, (8 + 3 + 1)/3, (3 + 1 + 5)/3
    assert (float(method.global_model()["mean"][0]), int(method.global_model()["n"])) == (3.0, 3)


def test_a_window_that_is_not_full_is_averaged_as_it_is():
    method = begun(IMA, start=0.0, window=5)
    for number, value in enumerate((2.0, 4.0, 9.0), start=1):
        feed(method, number, arrays(value))
    assert method.global_model()["w"].tolist() == [5, 5]


def test_a_lost_upload_and_a_lost_round():
    method = begun(IMA, start=0.0, window=2)
    feed(method, 1, arrays(2.0), arrays(6.0))
    assert feed(method, 2) == {}
    feed(method, 3, arrays(8.0))
    assert method.global_model()["w"].tolist() == [6, 6]


def test_the_rate_falls_with_each_averaged_round():
    objective, rates = Milder(IMAParams(start=0.5, lr_decay=0.5)), []
    net = v.small_net()
    for number in range(1, 11):
        visit = v.visit(net, 0, 3, round=number)
        assert objective.prepare(visit) == {}
        rates.append(visit.lr)
    assert rates == pytest.approx([0.1] * 6 + [0.05, 0.025, 0.0125, 0.00625])
