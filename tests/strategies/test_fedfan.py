"""FedFan: pushed along coherent steps, opened by its way, and averaged over its means."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.fedfan import FedFan, FedFanParams, newest
from fedcross.strategies.method import Round, Upload
from tests.support import pools
from tests.support.pools import draws, feed, model

#: The rule without the correction, which has tests of its own.
PLAIN = {"correct": False, "reach": 4.0}


@contextmanager
def own_share(share):
    """Let the pool be as open as a test wants it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedFanParams, "own", lambda self, visits: share)
        yield


def begun(k, start=None, **values):
    """Return the plain rule with k slots, with these settings changed."""
    return pools.begun(FedFan, k, start, **(PLAIN | values))


def one(*values):
    """Models with a single parameter, or with several if tuples are given."""
    return {slot: {"w": np.atleast_1d(np.float32(value))} for slot, value in enumerate(values)}


def test_four_rounds_by_hand():
    """K = 2, reach = 1, start 0, one weight, so a cosine is 1, 0 or -1, and g = 9/9, 9/10, 9/11, 9/12.

    Round 1: 0 and 0 become 1 and 3, M = 2, D = 2; a visit u = (1 + 9)/2 = 5, n = 2/sqrt(5): a = 0, both 2; W = 2.
    Round 2: become 4 and 8, M = 6, D = 4, cosine 1; u = 5 + .9 (20 - 5) = 18.5, n^2 = 36/18.5, a = 1 - (18.5/36)^2:
    6 -+ 2 a and a push of 4; W = 2 + .9 * 4.
    """
    method = begun(2, {"w": np.float32([0.0])}, reach=1.0)
    feed(method, 1, one(1, 3))
    assert method.pool.rows.ravel().tolist() == [2, 2]
    assert method.visit == pytest.approx(5)
    metrics = feed(method, 2, one(4, 8))
    own = 1 - (18.5 / 36) ** 2
    assert method.visit == pytest.approx(18.5)
    assert metrics["own_share"] == pytest.approx(own)
    assert metrics["way"] == pytest.approx(6 / math.sqrt(18.5))
    assert metrics["push"] == 1
    sent = [10 - 2 * own, 10 + 2 * own]
    assert method.pool.rows.ravel().tolist() == pytest.approx(sent)
    assert method.global_model()["w"] == pytest.approx(5.6)
    # Round 3: to 3 and 5, M = 4, D = -2, cosine -1, no push; u and n from the lengths of both changes; g = 9/11.
    metrics = feed(method, 3, one(3, 5))
    visit = 18.5 + 9 / 11 * (((sent[0] - 3) ** 2 + (sent[1] - 5) ** 2) / 2 - 18.5)
    assert method.visit == pytest.approx(visit)
    assert (metrics["push"], metrics["own_share"]) == (0, 0)  # u is above 16, the way's square
    assert method.pool.rows.ravel().tolist() == pytest.approx([4, 4])
    assert method.global_model()["w"] == pytest.approx(5.6 + 9 / 11 * (4 - 5.6))
    # Round 4: to 1 and 3, M = 2, D = -2, cosine 1: both go on to 0; W goes three quarters of the way to 2.
    before = float(method.global_model()["w"][0])
    feed(method, 4, one(1, 3))
    assert method.global_model()["w"] == pytest.approx(before + 0.75 * (2 - before))
    assert method.pool.rows.ravel().tolist() == pytest.approx([0, 0], abs=1e-6)


def test_the_push_is_the_cosine_of_the_last_two_steps():
    """Steps (1, 0) and (1, 1): cosine 1/sqrt(2), of which half is taken. All slots agree: no pull."""
    method = begun(2, {"w": np.zeros(2, np.float32)}, push=0.5)
    feed(method, 1, one((1, 0), (1, 0)))
    metrics = feed(method, 2, one((2, 1), (2, 1)))
    assert metrics["push"] == pytest.approx(0.5 / math.sqrt(2))
    np.testing.assert_allclose(method.pool.rows, [np.array([2, 1]) + metrics["push"]] * 2, rtol=1e-6)


def test_statistics_are_averaged_and_pulled_but_never_pushed():
    """Entry `mean` of the test model is a statistic: 1 in all slots, then 2. Its counters are truncated means."""
    method = begun(3, reach=2.0)
    feed(method, 1, {slot: model(1.0, count=slot) for slot in range(3)})
    with own_share(5 / 7):
        feed(method, 2, {slot: model(2.0, count=slot + 1) for slot in range(3)})
    sent = method.pool.model(0)
    assert sent["mean"] == 2
    assert sent["w0"].tolist() == pytest.approx([3, 3])  # 2 and a step of 1, pushed whole
    assert method.global_model()["mean"] == pytest.approx(1.9)
    assert method.global_model()["n"] == 2
    # Counters 1, 2, 3 with a = 5/7 on their mean 2: 1.29, 2, 2.71, truncated.
    assert [int(method.pool.model(slot)["n"]) for slot in range(3)] == [1, 2, 2]


def test_statistics_do_not_decide_how_coherent_the_steps_are():
    """The weights turn round while the statistic goes on far: no push."""
    method = begun(2)
    for number, (weight, statistic) in enumerate([(1.0, 100.0), (0.0, 200.0)], start=1):
        sent = model(weight)
        sent["mean"][...] = statistic
        metrics = feed(method, number, dict.fromkeys(range(2), sent))
    assert metrics["push"] == 0


def test_a_lost_slot_counts_in_the_mean_and_follows_the_pool():
    """Round 1: 0, 3, 6: all slots M = 3. Round 2 without slot 1: 1.5, 3, 10.5 with M = 5, D = 2.

    With a = 2/3: 1 + 5/3, 2 + 5/3, 7 + 5/3, and all go on by 2. The visit is that of the two others, with
    g = 9/10: 15 + .9 ((1.5^2 + 7.5^2)/2 - 15).
    """
    method = begun(3, {"w": np.float32([0.0])})
    feed(method, 1, one(0, 3, 6))
    uploads = one(1.5, 0, 10.5)
    del uploads[1]
    with own_share(2 / 3):
        feed(method, 2, uploads)
    assert method.visit == pytest.approx(15 + 0.9 * (29.25 - 15))
    assert method.pool.rows.ravel().tolist() == pytest.approx([1 + 11 / 3, 2 + 11 / 3, 7 + 11 / 3])
    assert method.queue == [1, 0, 2]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 7), st.floats(0, 0.99), st.floats(0, 2), st.integers(0, 99))
def test_the_pools_mean_goes_on_and_its_variance_falls_to_the_square(k, alpha, reach, seed):
    method, sent = begun(k, alpha=alpha, reach=reach, diagnostics_every=0), draws(k, seed)
    feed(method, 1, draws(k, seed + 100))
    before = np.stack([np.concatenate([u[e].ravel() for e in ("w0", "w1", "w2")]) for u in sent.values()])
    mean, last = before.astype(np.float64).mean(0), method.mean[-1, :6].copy()
    metrics = feed(method, 2, sent)
    after = method.pool.rows[:, :6].astype(np.float64)
    np.testing.assert_allclose(after.mean(0), mean + metrics["push"] * (mean - last), rtol=0, atol=5e-6)
    own = metrics["own_share"]
    np.testing.assert_allclose(after.var(0), own**2 * before.astype(np.float64).var(0), rtol=1e-4, atol=1e-6)


def test_the_global_models_weights_are_positive_and_add_up_to_1():
    weights = np.zeros(61)
    weights[0] = 1  # the initial model
    for number in range(1, 61):
        weights *= 1 - newest(number)
        weights[number] = newest(number)
    assert weights.min() >= 0
    assert weights[0] == 0
    assert weights.sum() == pytest.approx(1)
    assert (np.diff(weights[1:]) >= -1e-12).all()  # newer means weigh no less


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 0.999), st.floats(0, 9), st.floats(0, 500), st.floats(0, 5))
def test_a_longer_way_opens_the_pool_up_to_alpha(alpha, reach, visits, more):
    params = FedFanParams(alpha=alpha, reach=reach)
    assert params.own(0) == params.own(reach) == 0
    assert 0 <= params.own(visits) <= params.own(visits + more) <= alpha


def test_the_share_by_hand():
    """Twice the reach: 1 - 1/16. No reach: alpha as soon as the mean has moved at all."""
    assert FedFanParams(reach=3.0, alpha=0.999).own(6.0) == 0.9375
    assert FedFanParams(reach=0.0).own(0.1) == 0.99


def test_a_value_that_all_share_and_that_does_not_move_stays_to_the_bit():
    value = float(np.float32(0.1))
    method = begun(7, start=model(value, count=3))
    for number in (1, 2, 3):
        feed(method, number, {slot: model(value, count=3) for slot in range(7)})
    assert (method.pool.rows[:, :2] == np.float32(value)).all()
    assert (method.pool.integers == 3).all()
    assert (method.global_model()["w0"] == np.float32(value)).all()


def upload(slot, client, value):
    return Upload(client, slot, {"w": np.float32([value])}, {}, 1, {})


def test_uploads_are_corrected_by_hand():
    """K = 3, one weight, start 0, open at 3/4 in round 2, not pushed. Client 7 goes 1 up, client 8 3 up, 9 is new.

    Round 1, in which slot 2 is lost: M = 4/3, and Y = 2. Round 2, clients 8 and 9 alone, 3 and 5 up: client 8 differed
    by 1 from Y, client 9 is unknown: R = 1/2, and they come 2.5 and 4.5 up; M goes up by 7/3. A visit is as long as it
    was before the correction.
    """
    method = begun(3, {"w": np.float32([0.0])}, push=0.0, correct=True)
    method.aggregate(Round(1, 0, (7, 8, 9), 3), [upload(0, 7, 1), upload(1, 8, 3)])
    sent = 4 / 3
    assert method.pool.rows.ravel().tolist() == pytest.approx([sent] * 3)
    with own_share(0.75):
        method.aggregate(Round(2, 0, (9, 8, 7), 3), [upload(0, 9, sent + 5), upload(1, 8, sent + 3)])
    assert method.mean.ravel().tolist() == pytest.approx([sent + 7 / 3])
    ways = [7 / 3 + 3 / 4 * (way - 7 / 3) for way in (4.5, 2.5, 0)]
    assert method.pool.rows.ravel().tolist() == pytest.approx([sent + way for way in ways])
    assert method.visit == pytest.approx(5 + 0.9 * ((9 + 25) / 2 - 5))
    assert {c: update["w"].tolist() for c, update in method.updates.items()} == {
        c: [pytest.approx(2 * c - 13, rel=1e-5)] for c in (7, 8, 9)
    }


def test_rounds_without_uploads_leave_no_trace():
    """Two lost rounds before the first: the same averages as without them."""
    late, early = (begun(2, {"w": np.float32([0.0])}) for _ in range(2))
    feed(late, 1, {})
    feed(late, 2, {})
    for number in (1, 2):
        feed(late, number + 2, one(number, 3 * number))
        feed(early, number, one(number, 3 * number))
    assert late.visit == early.visit > 0
    assert late.global_model()["w"] == early.global_model()["w"]


def test_statistics_are_not_corrected_and_nothing_is_kept_without_a_correction():
    for correct, change in ((True, 2.0), (False, 3.0)):
        method = begun(2, alpha=0.0, push=0.0, correct=correct)
        feed(method, 1, {0: model(1.0), 1: model(3.0)})
        feed(method, 2, {1: model(5.0)})  # from 2, 3 up as before: 1 more than the mean of all
        sent = method.pool.model(0)
        assert sent["w0"].tolist() == pytest.approx([(2 + 2 + change) / 2] * 2)
        assert sent["mean"].tolist() == [3.5]
        assert len(method.updates) == (2 if correct else 0)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 6), st.integers(0, 99))
def test_clients_that_always_do_the_same_come_to_the_mean_of_all(clients, seed):
    """With constant changes the mean moves like the mean change of all clients, whoever takes part."""
    habits = np.random.default_rng(seed).normal(size=clients).astype(np.float32)
    method = begun(clients, {"w": np.float32([0.0])}, alpha=0.0, push=0.0, correct=True)
    feed(method, 1, one(*habits))
    sent = float(method.pool.rows[0, 0])
    feed(method, 2, {slot: {"w": np.float32([sent + habits[slot]])} for slot in (0, 1)})
    np.testing.assert_allclose(method.mean.ravel()[0], sent + 2 / clients * habits.mean(), rtol=0, atol=1e-5)
