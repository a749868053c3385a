"""FedFan: pushed along coherent steps, opened by its way, and averaged over its means."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.fedfan import FedFan, FedFanParams
from tests.support import pools
from tests.support.pools import draws, feed, model

#: The rule without what has tests of its own.
PLAIN = {"limit": None, "memory_mb": 0, "shrink": 0.0, "reach": 4.0, "sharpness": 4.0}


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
    """K = 2, reach = 1, e = 1, start 0, one weight, so a cosine is 1, 0 or -1, and g = 2/2, 2/3, 2/4, 2/5.

    Round 1: 0 and 0 become 1 and 3, M = 2, D = 2; a visit u = (1 + 9)/2 = 5, n = 2/sqrt(5): a = 0, both 2; W = 2.
    Round 2: become 4 and 8, M = 6, D = 4, cosine 1; u = 5 + 2/3 (20 - 5) = 15, n^2 = 36/15,
    a = 1 - (15/36)^2 = 119/144: 6 -+ 2 * 119/144 and a push of 4; W = 2 + 8/3.
    """
    method = begun(2, {"w": np.float32([0.0])}, reach=1.0, tail=1.0, limit=None)
    feed(method, 1, one(1, 3))
    assert method.pool.rows.ravel().tolist() == [2, 2]
    assert method.visit == 5
    metrics = feed(method, 2, one(4, 8))
    assert method.visit == pytest.approx(15)
    assert metrics["own_share"] == pytest.approx(119 / 144)
    assert metrics["way"] == pytest.approx(6 / math.sqrt(15))
    assert metrics["push"] == 1
    sent = [10 - 2 * 119 / 144, 10 + 2 * 119 / 144]
    assert method.pool.rows.ravel().tolist() == pytest.approx(sent)
    assert method.global_model()["w"] == pytest.approx(14 / 3)
    # Round 3: to 3 and 5, M = 4, D = -2, cosine -1, no push; u and n from the lengths of both changes; g = 1/2.
    metrics = feed(method, 3, one(3, 5))
    visit = 15 + 1 / 2 * (((sent[0] - 3) ** 2 + (sent[1] - 5) ** 2) / 2 - 15)
    own = max(0.0, 1 - (visit / 16) ** 2)
    assert method.visit == pytest.approx(visit)
    assert (metrics["push"], metrics["own_share"]) == (0, pytest.approx(own))
    assert own == 0  # changes of 5 and 6 beside a way of 4
    assert method.pool.rows.ravel().tolist() == pytest.approx([4, 4])
    assert method.global_model()["w"] == pytest.approx(13 / 3)
    # Round 4: to 1 and 3, M = 2, D = -2, cosine 1: both go on to 0; W = 13/3 + 2/5 (2 - 13/3) = 17/5.
    feed(method, 4, one(1, 3))
    assert method.global_model()["w"] == pytest.approx(17 / 5)


def test_the_push_is_the_cosine_of_the_last_two_steps():
    """Steps (1, 0) and (1, 1): cosine 1/sqrt(2), of which p = .5 is taken. All slots agree: no pull."""
    method = begun(2, {"w": np.zeros(2, np.float32)}, push=0.5)
    feed(method, 1, one((1, 0), (1, 0)))
    metrics = feed(method, 2, one((2, 1), (2, 1)))
    assert metrics["push"] == pytest.approx(0.5 / math.sqrt(2))
    np.testing.assert_allclose(method.pool.rows, [np.array([2, 1]) + metrics["push"]] * 2, rtol=1e-6)


def test_statistics_are_averaged_and_pulled_but_never_pushed():
    """Entry `mean` of the test model is a statistic: 1 in all slots, then 2. Its counters are truncated means."""
    method = begun(3, tail=0.0, reach=2.0)
    feed(method, 1, {slot: model(1.0, count=slot) for slot in range(3)})
    with own_share(5 / 7):
        feed(method, 2, {slot: model(2.0, count=slot + 1) for slot in range(3)})
    sent = method.pool.model(0)
    assert sent["mean"] == 2
    assert sent["w0"].tolist() == pytest.approx([3, 3])  # 2 and a step of 1, pushed whole
    assert method.global_model()["mean"] == 1.5
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
    g = 3/4: 15 + 3/4 ((1.5^2 + 7.5^2)/2 - 15).
    """
    method = begun(3, {"w": np.float32([0.0])}, tail=2.0)
    feed(method, 1, one(0, 3, 6))
    uploads = one(1.5, 0, 10.5)
    del uploads[1]
    with own_share(2 / 3):
        feed(method, 2, uploads)
    assert method.visit == pytest.approx(15 + 0.75 * (29.25 - 15))
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


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 30), st.integers(1, 60))
def test_the_global_models_weights_are_positive_and_add_up_to_1(tail, last):
    params = FedFanParams(tail=tail)
    weights = np.zeros(last + 1)
    weights[0] = 1  # the initial model
    for number in range(1, last + 1):
        weights *= 1 - params.newest(number)
        weights[number] = params.newest(number)
    assert weights.min() >= 0
    assert weights[0] == 0
    assert weights.sum() == pytest.approx(1)
    assert (np.diff(weights[1:]) >= -1e-12).all()  # newer means weigh no less


def test_a_tail_of_0_is_the_plain_average_of_all_means():
    method = begun(2, {"w": np.float32([0.0])}, tail=0.0)
    means = [4.0, 1.0, 7.0, 0.0]
    for number, mean in enumerate(means, start=1):
        feed(method, number, one(mean - 1, mean + 1))
        assert method.global_model()["w"] == pytest.approx(np.mean(means[:number]), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 0.999), st.floats(0, 9), st.floats(0, 500), st.floats(0, 5))
def test_a_longer_way_opens_the_pool_up_to_alpha(alpha, reach, visits, more):
    params = FedFanParams(alpha=alpha, reach=reach)
    assert params.own(0) == params.own(reach) == 0
    assert 0 <= params.own(visits) <= params.own(visits + more) <= alpha


def test_the_share_by_hand():
    """Twice the reach: 1 - 1/16 or 1 - 1/256. No reach: alpha as soon as the mean has moved at all."""
    assert FedFanParams(reach=3.0, sharpness=4.0, alpha=0.999).own(6.0) == 0.9375
    assert FedFanParams(reach=3.0, sharpness=8.0, alpha=0.999).own(6.0) == 0.99609375
    assert FedFanParams(reach=0.0).own(0.1) == 0.99


def test_a_value_that_all_share_and_that_does_not_move_stays_to_the_bit():
    value = float(np.float32(0.1))
    method = begun(7, start=model(value, count=3))
    for number in (1, 2, 3):
        feed(method, number, {slot: model(value, count=3) for slot in range(7)})
    assert (method.pool.rows[:, :2] == np.float32(value)).all()
    assert (method.pool.integers == 3).all()
    assert (method.global_model()["w0"] == np.float32(value)).all()


def test_uploads_are_corrected_by_hand():
    """K = 2, one weight, start 0, closed, not pushed. Client 0 always goes 1 up, client 1 3 up.

    Round 1: both unknown: M = 2, and Y = 2. Round 2 from 2: they come to 3 and 5; both differ from Y as before (-1, 1),
    so s = 1: 3 - (1 - 2) = 4 and 5 - (3 - 2) = 4. M = 4. Visits are as long as before: u = (1 + 9)/2.
    """
    method = begun(2, {"w": np.float32([0.0])}, alpha=0.0, push=0.0, tail=1e9, memory_mb=1)
    assert feed(method, 1, one(1, 3))["recalled"] == 0
    assert method.pool.rows.ravel().tolist() == [2, 2]
    assert method.visit == pytest.approx(5)
    assert feed(method, 2, one(3, 5))["recalled"] == 1
    assert method.pool.rows.ravel().tolist() == [4, 4]
    assert method.visit == pytest.approx(5)


def test_a_visit_out_of_measure_is_shortened_by_hand():
    """K = 2, closed, not pushed, limit 2. Round 1 from 0: 1 and 1, u = 1. Round 2 from 1: 2 and 1 + 30.

    The second has gone 30 where 2 may be: 3. M = 2.5; tail = 0: u = 1 + ((1 + 4)/2 - 1)/2 = 1.75. Round 3: what is just
    as long as it may be stays.
    """
    method = begun(2, {"w": np.float32([0.0])}, alpha=0.0, push=0.0, tail=0.0, limit=2.0)
    assert feed(method, 1, one(1, 1))["shortened"] == 0
    assert feed(method, 2, one(2, 31))["shortened"] == 1
    assert method.pool.rows.ravel().tolist() == [2.5, 2.5]
    assert method.visit == 1.75
    method.visit = 4.0
    assert feed(method, 3, one(6.5, 2.5))["shortened"] == 0
    assert method.pool.rows.ravel().tolist() == [4.5, 4.5]


def test_the_first_round_is_measured_by_its_median_and_so_is_one_where_most_visits_are_out_of_measure():
    """Three slots from 0, closed, not pushed. Round 1: 1, 1 and 100: the last may go 2^2 times 1. M = 2.

    tail = 0: u = (1 + 1 + 16)/3 = 6. Round 2: all change by 10, more than 2 sqrt(6): none is shortened; u = 53.
    Round 3: two of three change by 100, more than 2 sqrt(53): the same.
    """
    method = begun(3, {"w": np.float32([0.0])}, alpha=0.0, push=0.0, tail=0.0, limit=2.0)
    assert feed(method, 1, one(1, 1, 100))["shortened"] == 1
    assert method.pool.rows.ravel().tolist() == [2, 2, 2]
    assert method.visit == 6
    start = float(method.pool.rows[0, 0])
    assert feed(method, 2, one(*[start + 10] * 3))["shortened"] == 0
    assert method.visit == pytest.approx(53)
    assert feed(method, 3, one(start + 11, *[start + 110] * 2))["shortened"] == 0


def test_a_finite_upload_of_any_size_leaves_a_finite_measure():
    """3e38 squared is beyond float32, and beyond what a sum of float32 can hold."""
    method = begun(3, {"w": np.zeros(4, np.float32)}, limit=2.0, memory_mb=1)
    metrics = feed(method, 1, one([1] * 4, [1] * 4, [3e38] * 4))
    assert method.visit == pytest.approx((4 + 4 + 64) / 3)
    assert np.isfinite(method.pool.rows).all()
    assert math.isfinite(metrics["way"])


def test_what_did_not_move_does_not_count_in_the_median_and_few_visits_do_not_either():
    """Round 1: 0, 0, 1, 1 and 3e38: the median of what moved is 1, so the last may go 4. Round 2: it comes alone."""
    method = begun(5, {"w": np.float32([0.0])}, alpha=0.0, push=0.0, tail=0.0, limit=2.0)
    assert feed(method, 1, one(0, 0, 1, 1, 3e38))["shortened"] == 1
    assert method.visit == pytest.approx((1 + 1 + 16) / 5)
    sent, usual = float(method.pool.rows[0, 0]), 2 * math.sqrt(method.visit)
    lone = feed(method, 2, {0: {"w": np.float32([3e38])}})
    assert lone["shortened"] == 1
    assert method.visit == pytest.approx((18 / 5 + usual**2) / 2, rel=1e-5)
    assert method.pool.rows[0, 0] == pytest.approx(sent + usual / 5, rel=1e-5)


def test_statistics_of_a_shortened_visit_stay_and_without_a_limit_nothing_is_shortened():
    for limit, weight in ((2.0, 3.0), (None, 10.0)):
        method = begun(3, alpha=0.0, push=0.0, limit=limit)
        feed(method, 1, {slot: model(1.0) for slot in range(3)})
        feed(method, 2, {0: model(1.0), 1: model(1.0), 2: model(10.0)})
        sent = method.pool.model(0)
        assert sent["w0"].tolist() == pytest.approx([(1 + 1 + weight) / 3] * 2)
        assert sent["mean"].tolist() == [4.0]


def test_the_pool_is_shrunk_behind_the_rule_but_not_its_statistics():
    """All uploads are 1: the pool gets 1 and a step of 0, times .75; M and the global model stay at 1."""
    method = begun(2, shrink=0.25)
    feed(method, 1, {slot: model(1.0, count=4) for slot in range(2)})
    sent, kept = method.pool.model(1), method.global_model()
    assert (sent["w0"].tolist(), sent["mean"].tolist(), int(sent["n"])) == ([0.75, 0.75], [1.0], 4)
    assert kept["w0"].tolist() == [1.0, 1.0]


def test_a_memory_without_room_for_all_clients_is_told():
    """3 MiB a client: 256 hold 85."""
    (remark,) = FedFanParams(memory_mb=256).room_remarks(3 << 20, 100)
    assert "room for what 85 of 100 clients changed last" in remark
    assert "All need 300" in remark
    assert FedFanParams(memory_mb=256).room_remarks(3 << 20, 85) == FedFanParams(memory_mb=0).room_remarks(9, 100) == []
