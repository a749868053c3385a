"""The pool: rows, mean, Gram matrix, mixing in place, resizing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.pool import loops, mixing
from fedcross.strategies.pool.mixing import diagnostics
from fedcross.strategies.pool.pool import Layout, Pool

BN = {"w": np.array([1.0, 2.0], np.float32), "var": np.array([4.0], np.float32), "count": np.array(10)}


def bn_pool(k=2):
    pool = Pool(Layout.of(BN, ["w"]), k)
    pool.fill(BN)
    return pool


def random_pool(k, d, seed=0, dtype=np.float32):
    pool = Pool(Layout.of({"w": np.zeros(d, dtype)}), k)
    pool.rows[...] = np.random.default_rng(seed).normal(size=(k, d))
    return pool


@pytest.fixture(autouse=True, scope="module", params=["torch", "compiled"])
def both(request):
    """Run everything with torch's operations and with the compiled loops, which only large pools use."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compiled":
            patch.setattr(loops, "COMPILED_BYTES", 0)
        yield request.param


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Make even a small pool many blocks: 256 columns each."""
    monkeypatch.setattr(loops, "BLOCK_BYTES", 1)


def test_fill_write_and_model():
    pool = bn_pool(3)
    assert len(pool) == 3
    pool.rows[...], pool.integers[...] = 0, 0
    pool.fill(BN)
    assert (pool.rows.tolist(), pool.integers.tolist()) == ([[1, 2, 4]] * 3, [[10]] * 3)
    pool.write(1, {"w": np.array([5, 6], np.float32), "var": np.array([7], np.float32), "count": np.array(8)})
    assert pool.rows.tolist() == [[1, 2, 4], [5, 6, 7], [1, 2, 4]]
    assert pool.integers.tolist() == [[10], [8], [10]]
    pool.model(2)["w"][0] = 9
    assert pool.rows[2, 0] == 9
    assert pool.model(1)["count"] == 8


@pytest.mark.slow
def test_mean_is_uniform_and_truncates_integers():
    """(1 + 5) / 2 = 3, (2 + 6) / 2 = 4, (4 + 7) / 2 = 5.5; counters (10 + 7) / 2 = 8.5 -> 8, (-10 - 7) / 2 -> -8."""
    pool = bn_pool(2)
    pool.write(1, {"w": np.array([5, 6], np.float32), "var": np.array([7], np.float32), "count": np.array(7)})
    mean = pool.mean()
    assert mean["w"].tolist() == [3, 4]
    assert mean["var"].tolist() == [5.5]
    assert mean["count"] == 8
    assert mean["count"].dtype == np.int64
    pool.integers *= -1
    assert pool.mean()["count"] == -8
    alone = pool.mean(members=[1])
    assert alone["w"].tolist() == [5, 6]
    assert alone["count"] == -7


@pytest.mark.slow
@given(
    k=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_mixing_in_place_is_the_dense_product(k, seed, data):
    """Any row-stochastic matrix, also one with idle slots, against numpy's float64 product."""
    matrix = np.eye(k)
    for i in range(k):
        sources = data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=4, unique=True))
        weights = np.array([data.draw(st.floats(0.01, 1)) for _ in sources])
        if not data.draw(st.booleans()):
            matrix[i] = 0
            matrix[i, sources] = weights / weights.sum()
    pool = random_pool(k, 600, seed)
    before = pool.rows.astype(np.float64)
    pool.mix(matrix)
    np.testing.assert_allclose(pool.rows, matrix @ before, rtol=0, atol=3e-6)


@given(k=st.integers(2, 9), alpha=st.floats(0, 1), round_number=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_in_order_keeps_the_mean_and_takes_out_what_the_identity_says(k, alpha, round_number, seed):
    """sum ||w_i - x||^2 = sum ||v_i - x||^2 - a(1 - a) sum ||v_i - v_co(i)||^2 for a permutation co and any x.

    For one i: ||a p + (1-a) q||^2 = a ||p||^2 + (1-a) ||q||^2 - a(1-a) ||p - q||^2 with p = v_i - x, q = v_co(i) - x.
    Summed over i, q runs over the same vectors as p, so a + (1 - a) = 1 of the first sum is left.
    """
    pool = random_pool(k, 300, seed)
    before = pool.rows.astype(np.float64)
    partners = mixing.in_order(k, round_number)
    pool.mix(mixing.cross(k, range(k), partners, alpha))
    after = pool.rows.astype(np.float64)
    scale = np.abs(before).max()
    np.testing.assert_allclose(after.mean(0), before.mean(0), rtol=0, atol=1e-6 * scale)
    x = np.random.default_rng(seed + 1).normal(size=300)
    taken = alpha * (1 - alpha) * ((before - before[partners]) ** 2).sum()
    np.testing.assert_allclose(((after - x) ** 2).sum(), ((before - x) ** 2).sum() - taken, rtol=1e-5)


def test_counters_and_buffers_are_mixed_and_counters_truncated():
    """Buffers mix like parameters: 0.75 * 4 + 0.25 * 8 = 5 and 0.75 * 8 + 0.25 * 4 = 7.

    Counters: 0.75 * 10 + 0.25 * 11 = 10.25 -> 10 and 0.75 * 11 + 0.25 * 10 = 10.75 -> 10.
    Equal counters stay, although 0.9 * 10 + 0.1 * 10 may be 9.999... in floats.
    """
    pool = bn_pool(2)
    pool.rows[1, 2] = 8
    pool.integers[1] = 11
    pool.mix(mixing.cross(2, [0, 1], [1, 0], 0.75))
    assert pool.rows[:, 2].tolist() == [5, 7]
    assert pool.integers[:, 0].tolist() == [10, 10]
    for count in range(1, 400):
        pool.integers[...] = count
        pool.mix(mixing.cross(2, [0, 1], [1, 0], 0.9))
        assert pool.integers[:, 0].tolist() == [count, count]


def test_slots_that_take_no_part_stay_to_the_bit(tiny_blocks):
    pool = random_pool(5, 600)
    pool.rows[3, :3] = [np.nan, -0.0, np.inf]
    before = pool.rows.copy()
    pool.mix(mixing.cross(5, [0, 2, 4], [1, 2, 0], 0.9))
    assert pool.rows[[1, 3]].tobytes() == before[[1, 3]].tobytes()
    assert np.isfinite(pool.rows[[0, 2, 4]]).all()
    expected = 0.9 * before[[0, 2, 4]] + 0.1 * before[[2, 4, 0]]
    np.testing.assert_allclose(pool.rows[[0, 2, 4]], expected, atol=1e-6)


def test_routing_moves_models_exactly(tiny_blocks):
    pool = random_pool(4, 700)
    pool.rows[0, 0] = -0.0
    pool.integers = np.arange(4)[:, None] * 1000
    before = pool.rows.copy()
    pool.mix(mixing.cross(4, [0, 1, 2, 3], [2, 0, 3, 1], 0.0))
    assert pool.rows.tobytes() == before[[2, 0, 3, 1]].tobytes()
    assert pool.integers[:, 0].tolist() == [2000, 0, 3000, 1000]


def test_models_that_agree_stay_as_they_are():
    pool = random_pool(6, 500)
    pool.rows[1:] = pool.rows[0]
    before = pool.rows.copy()
    pool.mix(mixing.cross(6, range(6), [1, 2, 3, 4, 5, 0], 0.99))
    pool.mix(mixing.propellers(6, range(6), [1, 3], 0.7))
    pool.mix(mixing.uniform(6, range(6)))
    assert pool.rows.tobytes() == before.tobytes()


def test_the_number_of_threads_changes_no_bit(tiny_blocks):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            pool = random_pool(7, 5000)
            gram = pool.gram()
            pool.mix(mixing.cross(7, range(7), [1, 2, 3, 4, 5, 6, 0], 0.9))
            results.append((gram.tobytes(), pool.rows.tobytes(), pool.mean()["w"].tobytes()))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_growing_adds_copies_of_the_mean():
    """Rows (1, 2, 4) and (3, 4, 8) have the mean (2, 3, 6); counters 10 and 13 the truncated mean 11."""
    pool = bn_pool(2)
    pool.rows[1] = [3, 4, 8]
    pool.integers[1] = 13
    pool.resize(4)
    assert pool.rows.tolist() == [[1, 2, 4], [3, 4, 8], [2, 3, 6], [2, 3, 6]]
    assert pool.integers[:, 0].tolist() == [10, 13, 11, 11]


def test_shrinking_shifts_the_parameters_and_keeps_the_mean():
    """Parameters (1, 2), (3, 4), (8, 9): mean (4, 5), of the first two (2, 3), so the shift is (2, 2).

    Variances 1, 11, 0: mean 4, of the first two 6; shifted by 4 - 6 = -2 the first would be -1. They become 4.
    """
    pool = bn_pool(3)
    pool.rows[...] = [[1, 2, 1], [3, 4, 11], [8, 9, 0]]
    pool.integers[:, 0] = [1, 2, 3]
    pool.resize(2)
    assert pool.rows.tolist() == [[3, 4, 4], [5, 6, 4]]
    assert pool.mean()["w"].tolist() == [4, 5]
    assert pool.integers[:, 0].tolist() == [1, 2]


@given(k=st.integers(1, 6), to=st.integers(1, 6), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_resizing_keeps_the_mean(k, to, seed):
    pool = random_pool(k, 40, seed)
    mean = pool.mean()["w"].copy()
    pool.resize(to)
    assert len(pool) == len(pool.widths) == to
    np.testing.assert_allclose(pool.mean()["w"], mean, atol=1e-6)


def test_state_is_the_pool_itself_and_comes_back():
    pool = bn_pool(3)
    pool.rows[2] = [7, 8, 9]
    state = pool.state()
    assert state["rows"] is pool.rows
    other = bn_pool(2)
    other.restore(state)
    assert len(other) == 3
    assert other.rows.tolist() == pool.rows.tolist()
    assert other.integers.tolist() == pool.integers.tolist()
    other.rows[...] = 0
    assert pool.rows[2, 0] == 7


def test_diagnostics_of_models_that_are_not_finite_are_silent(recwarn):
    assert math.isnan(diagnostics(np.full((2, 2), np.inf))["pool_similarity_mean"])
    assert not recwarn.list


def test_diagnostics_by_hand():
    """Models (1, 0) and (0, 1): cosine 0; the mean (.5, .5) has square .5, each is .5 (squared) away: spread 1.

    After alpha = 0.5 both are the mean: cosine 1, spread 0.
    """
    pool = random_pool(2, 2)
    pool.rows[...] = [[1, 0], [0, 1]]
    gram = pool.gram()
    assert diagnostics(gram) == {"pool_similarity_mean": 0.0, "pool_spread": 1.0}
    after = diagnostics(gram, mixing.cross(2, [0, 1], [1, 0], 0.5))
    assert after == pytest.approx({"pool_similarity_mean": 1.0, "pool_spread": 0.0})
    # alpha = .75: (.75, .25) and (.25, .75), cosine .375 / .625; squares .625, of the mean .5: spread sqrt(.125 / .5).
    shifted = diagnostics(gram, np.array([[0.75, 0.25], [0.25, 0.75]]))
    assert shifted == pytest.approx({"pool_similarity_mean": 0.6, "pool_spread": 0.5})
    # Rows (1, 0), (0, 2), squares 1 and 4. The first becomes (.5, 1), the second stays: cosine 2 / sqrt(1.25 * 4).
    one_sided = diagnostics(np.diag([1.0, 4.0]), np.array([[0.5, 0.5], [0, 1]]))
    assert one_sided["pool_similarity_mean"] == pytest.approx(2 / 5**0.5)
    assert diagnostics(np.array([[1, 1 + 1e-9], [1 + 1e-9, 1]]))["pool_spread"] == 0  # rounding: the mean seems longer
    opposite = diagnostics(np.array([[1, -1 - 1e-9], [-1 - 1e-9, 1]]), mixing.cross(2, [0, 1], [1, 0], 0.5))
    assert opposite == {"pool_similarity_mean": 0.0, "pool_spread": 0.0}  # both squared norms come out as -5e-10
    assert diagnostics(np.array([[2.0]])) == {"pool_similarity_mean": 1.0, "pool_spread": 0.0}
    assert diagnostics(np.zeros((2, 2))) == {"pool_similarity_mean": 0.0, "pool_spread": 0.0}
