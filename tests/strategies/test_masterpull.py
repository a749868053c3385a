"""Master pull: the pool's mean stays, its variance falls to a^2."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.masterpull import MasterPull
from tests.support.pools import begun, draws, feed, model


def test_three_slots_by_hand():
    """M = (1 + 5 + 9) / 3 = 5 and a = .75: .75 + 1.25 = 2, 5, 8. Counters 1, 2, 6: M = 3: 1.5, 2.25, 5.25 truncated."""
    method = begun(MasterPull, 3, alpha=0.75)
    feed(method, 1, {slot: model(v, count=c) for slot, (v, c) in enumerate([(1.0, 1), (5.0, 2), (9.0, 6)])})
    assert method.pool.rows[:, 0].tolist() == [2, 5, 8]
    assert method.pool.rows[:, 6].tolist() == [2, 5, 8]
    assert method.pool.integers.ravel().tolist() == [1, 2, 5]
    assert method.global_model()["w0"].tolist() == [5, 5]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 7), st.floats(0, 1), st.integers(0, 99))
def test_the_mean_stays_and_the_variance_falls_to_the_square(k, alpha, seed):
    method, sent = begun(MasterPull, k, alpha=alpha, diagnostics_every=0), draws(k, seed)
    before = np.stack([np.concatenate([u[e].ravel() for e in ("w0", "w1", "w2", "mean")]) for u in sent.values()])
    feed(method, 1, sent)
    after = method.pool.rows.astype(np.float64)
    np.testing.assert_allclose(after.mean(0), before.astype(np.float64).mean(0), rtol=0, atol=2e-6)
    np.testing.assert_allclose(after.var(0), alpha**2 * before.astype(np.float64).var(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("slots", [(0, 1, 2, 3), (0, 2, 3)])
def test_the_pass_is_the_mixing_matrix(slots):
    """Floats within rounding, counters to the bit; a lost slot keeps its model and pulls nobody."""
    method, sent = begun(MasterPull, 4, alpha=0.6), draws(0, 5, slots=slots)
    other = begun(MasterPull, 4)
    for slot, upload in sent.items():
        other.pool.write(slot, upload)
    kept = other.pool.rows[1].copy()
    share = 0.4 / len(slots)
    mixing = np.eye(4)
    mixing[np.ix_(slots, slots)] = 0.6 * np.eye(len(slots)) + share
    other.pool.mix(mixing)
    feed(method, 1, sent)
    np.testing.assert_allclose(method.pool.rows, other.pool.rows, rtol=0, atol=1e-6)
    assert (method.pool.integers == other.pool.integers).all()
    if 1 not in slots:
        assert (method.pool.rows[1] == kept).all()


def test_alpha_0_makes_all_slots_the_mean_and_1_none():
    mean = begun(MasterPull, 3, alpha=0.0)
    feed(mean, 1, draws(3, 1))
    assert (mean.pool.rows == mean.pool.rows[0]).all()
    apart, sent = begun(MasterPull, 3, alpha=1.0), draws(3, 1)
    feed(apart, 1, sent)
    assert all((apart.pool.model(slot)["w1"] == upload["w1"]).all() for slot, upload in sent.items())


def test_a_value_that_all_share_stays_to_the_bit():
    value = np.float32(0.1)
    method = begun(MasterPull, 7)
    feed(method, 1, {slot: model(float(value), count=3) for slot in range(7)})
    assert (method.pool.rows[:, :2] == value).all()
    assert (method.pool.integers == 3).all()


def test_a_schedule_counts_the_rounds():
    method = begun(MasterPull, 2, alpha={"stages": [{"until": 1, "value": 0}, {"value": 1}], "schedule": "staged"})
    feed(method, 1, {0: model(0.0), 1: model(10.0)})
    assert method.pool.rows[:, 0].tolist() == [5, 5]
    feed(method, 2, {0: model(0.0), 1: model(10.0)})
    assert method.pool.rows[:, 0].tolist() == [0, 10]
