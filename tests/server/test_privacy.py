"""Epsilon of composed Gaussian mechanisms."""

import math

import pytest
from scipy.stats import norm

from fedcross.conf.schema import Privacy
from fedcross.server.privacy import delta_of, epsilon, statement


@pytest.mark.parametrize(("noise", "uploads"), [(1.0, 1), (5.0, 10), (20.0, 100), (2.0, 50)])
def test_epsilon_is_the_smallest_for_its_delta(noise, uploads):
    """Balle and Wang, theorem 8: delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu)."""
    found, mu = epsilon(Privacy(noise=noise), uploads), 2 * math.sqrt(uploads) / noise
    delta = norm.cdf(mu / 2 - found / mu) - math.exp(found + norm.logcdf(-mu / 2 - found / mu))
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert delta_of(mu, found) == pytest.approx(delta, rel=1e-6)


def test_the_client_with_the_most_requests_counts():
    found = statement(Privacy(noise=4.0), {0: 3, 1: 5})
    assert found["uploads"] == 5
    assert found["epsilon"] == epsilon(Privacy(noise=4.0), 5)
    assert epsilon(Privacy(), 0) == 0.0
    assert epsilon(Privacy(noise=1e9), 1) == 0.0
    assert "5 uploads" in found["meaning"]
