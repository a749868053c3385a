"""FedExP: the server's step by hand."""

import numpy as np
import pytest

from fedcross.strategies.fedexp import FedExP
from tests.support.single import arrays, begun, feed


def test_the_step_by_hand():
    """From 0, d = (4, 0), (-2, 2), epsilon .5: mean ||d||^2 = (16 + 8)/2, mean d = (1, 1), 12/(2 (2 + .5)) = 2.4."""
    method = begun(FedExP, epsilon=0.5, weighting="uniform")
    metrics = feed(method, 1, arrays([4.0, 0.0], 2.0, 3), arrays([-2.0, 2.0], 4.0, 6), examples=[1, 5])
    assert metrics["server_step"] == pytest.approx(2.4)
    assert method.global_model()["w"] == pytest.approx([2.4, 2.4])
    assert (float(method.model["mean"][0]), int(method.model["n"])) == (3.0, 4)


def test_examples_weigh_both_means():
    """Weights 1/4 and 3/4: mean ||d||^2 = 4 + 6 = 10, mean d = (-.5, 1.5), 10/(2 * 2.5) = 2."""
    method = begun(FedExP, epsilon=0.0)
    metrics = feed(method, 1, arrays([4.0, 0.0]), arrays([-2.0, 2.0]), examples=[1, 3])
    assert metrics["server_step"] == pytest.approx(2)
    assert method.model["w"] == pytest.approx([-1, 3])


def test_the_step_is_never_below_one_and_never_above_the_limit():
    same_way = begun(FedExP)
    assert feed(same_way, 1, arrays(3.0), arrays(3.0)) == {"server_step": 1.0}
    assert same_way.model["w"].tolist() == [3, 3]
    still = begun(FedExP, epsilon=0.0)
    assert feed(still, 1, arrays(0.0)) == {"server_step": 1.0}
    limited = begun(FedExP, epsilon=0.0, most=1.5)
    assert feed(limited, 1, arrays([4.0, 0.0]), arrays([-2.0, 2.0])) == {"server_step": 1.5}


def test_the_mean_of_the_last_two_models_is_evaluated():
    """Results 3, 5 and 9: evaluated 3, 4, 7, with the newest statistics; clients get the newest."""
    method, seen = begun(FedExP), []
    assert feed(method, 1) == {}  # a round that lost everybody: the initial model is still no result
    for number, value in enumerate((3.0, 5.0, 9.0), start=2):
        feed(method, number, arrays(value, mean=value))
        seen.append(float(method.global_model()["w"][0]))
        assert method.global_model()["mean"] == value
        assert method.model["w"][0] == value
    assert seen == [3, 4, 7]
    newest = begun(FedExP, last_two=False)
    for number, value in enumerate((3.0, 5.0), start=1):
        feed(newest, number, arrays(value))
    assert newest.global_model()["w"].tolist() == [5, 5]


def test_many_steps_are_the_authors_formula():
    """``.5 sum p ||d||^2 / (||sum p d||^2 + S eps')`` of their code, with our epsilon = S eps', S = 3 uploads."""
    generator, method = np.random.default_rng(0), begun(FedExP, epsilon=0.03)
    w = np.zeros(2)
    for number in range(1, 5):
        uploads, n = w + generator.normal(size=(3, 2)), np.array([5, 2, 3])
        p = n / n.sum()
        d = uploads - w
        step = max(1.0, 0.5 * (p @ (d**2).sum(1)) / (((p @ d) ** 2).sum() + 3 * 0.01))
        metrics = feed(method, number, *(arrays(one) for one in uploads), examples=n.tolist())
        assert metrics["server_step"] == pytest.approx(step, rel=1e-4)
        w = w + step * (p @ d)
        np.testing.assert_allclose(method.model["w"], w, rtol=1e-4, atol=1e-5)
