"""Where a wrong loop would only be slower or a little less exact: the compiled products themselves, and single bits."""

import numpy as np
import pytest

from fedcross.strategies.parts.averaging import move, weighted_mean
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.mixing import diagnostics, mixed_integers

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("m", [1, 2, 3, 6, 9])
def test_the_compiled_products_of_a_narrow_pool_need_no_second_look(m, monkeypatch):
    """Of 10 models a distance of .01 apart; without the fallback that a wide pool has."""
    monkeypatch.setattr(loops, "COMPILED_BYTES", 1)
    monkeypatch.setattr(loops, "_products", lambda *_: pytest.fail("not compiled"))
    size = 2 * loops.CHUNK + 77
    rows = (RNG.standard_normal(size) + 0.01 * RNG.standard_normal((10, size))).astype(np.float32)
    members, columns = RNG.permutation(10)[:m], slice(5, size - 3)
    part = rows[members, columns].astype(np.float64)
    found, exact = loops.gram(rows, members, columns), part @ part.T
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    ours, true = [np.diag(g)[:, None] + np.diag(g)[None, :] - 2 * g for g in (found, exact)]
    np.testing.assert_allclose(ours, true, rtol=1e-3, atol=1e-3)  # squared distances, about 3.3


@pytest.mark.parametrize("m", [1, 2, 4, 6, 9])
def test_the_loops_as_plain_python_stay_within_their_arrays(m, monkeypatch):
    """Compiled code does not look at bounds. Blocks of 16 columns, the last one shorter."""
    monkeypatch.setattr(loops, "COMPILED_BYTES", 1)
    monkeypatch.setattr(loops, "CHUNK", 16)
    monkeypatch.setattr(loops, "_compiled", lambda: (loops._gram_loop, loops._mix_loop))
    monkeypatch.setattr(loops, "_products", lambda *_: pytest.fail("a second look"))
    rows = RNG.standard_normal(45) + 0.01 * RNG.standard_normal((10, 45))
    members = RNG.permutation(10)[:m]
    part = rows[members, 3:43]
    np.testing.assert_allclose(loops.gram(rows, members, slice(3, 43)), part @ part.T, rtol=1e-12)
    mixing, before = np.eye(10), rows.copy()
    mixing[members] = RNG.dirichlet(np.ones(10), m)
    loops.mix(rows, mixing)
    np.testing.assert_allclose(rows, mixing @ before, rtol=1e-12)


def test_pools_below_64_mib_are_not_compiled(monkeypatch):
    assert loops.COMPILED_BYTES == 64 * 2**20
    monkeypatch.setattr(loops, "_compiled", lambda: pytest.fail("compiled"))
    rows = RNG.standard_normal((2, 300)).astype(np.float32)
    assert loops.gram(rows, np.arange(2), slice(0, 300)).shape == (2, 2)
    loops.mix(rows, np.array([[0.5, 0.5], [0, 1]]))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_share_of_nothing_and_of_all_copies_to_the_bit(compiled, monkeypatch):
    monkeypatch.setattr(loops, "COMPILED_BYTES", 1 if compiled else 2**60)
    for own, kept in ((1e-20, 1), (1 - 1e-16, 0)):
        rows = np.float32([[1e8], [0.1]] if own < 0.5 else [[0.1], [1.0]])
        before = rows.copy()
        loops.mix(rows, np.array([[own, 1 - own], [0, 1]]))
        np.testing.assert_array_equal(rows[0], before[kept])


def test_counters_far_below_zero_and_values_that_are_no_integers_are_mixed():
    assert mixed_integers(np.array([[-1000], [-1004]]), 0.5 * np.eye(2) + 0.25).ravel().tolist() == [-1001, -1003]
    assert weighted_mean([{"w": np.float32([1])}, {"w": np.float32([2])}], [1, 1])["w"].tolist() == [1.5]


def test_a_step_along_the_mean_change_by_hand():
    """From 1 towards 3: half the way is 2, and the whole way stays as it is."""
    for step, expected in ((0.5, [2]), (1, [3])):
        mean = {"w": np.float32([3]), "n": np.float32([3])}
        move(mean, {"w": np.float32([1]), "n": np.float32([1])}, step, ["w"])
        assert (mean["w"].tolist(), mean["n"].tolist()) == (expected, [3])


@pytest.mark.parametrize("scale", [1, 0.01])
def test_similarity_and_spread_by_hand(scale):
    """Norms 2 and 3, product 3: cosine .5. Mean square 6.5, square of the mean 19 / 4."""
    found = diagnostics(scale * np.array([[4.0, 3.0], [3.0, 9.0]]))
    assert found == pytest.approx({"pool_similarity_mean": 0.5, "pool_spread": (1.75 / 4.75) ** 0.5})
    assert diagnostics(np.array([[4.0]])) == {"pool_similarity_mean": 1, "pool_spread": 0}
    assert diagnostics(np.zeros((2, 2))) == {"pool_similarity_mean": 0, "pool_spread": 0}
