"""The compiled loops by hand; tests/strategies/pool/test_pool.py runs every test of the pool through them as well."""

import numpy as np
import pytest

from fedcross.strategies.pool.kernels import GRAM_CHUNK, MIX_CHUNK, add_gram, mix


def test_gram_by_hand():
    rows = np.array([[1.0, 2.0, 3.0, 9.0], [0.0, -1.0, 1.0, 9.0], [2.0, 0.0, 0.0, 9.0]], np.float32)
    out = np.zeros((4, 4))
    add_gram(rows, np.array([0, 2]), 0, 3, np.float32(0), out)
    assert (out[0, 0], out[0, 1], out[1, 1]) == (14.0, 2.0, 4.0)  # rows 0 and 2 over three columns; the 9s are outside
    add_gram(rows, np.array([0, 2]), 0, 3, np.float32(0), out)
    assert (out[0, 0], out[0, 1], out[1, 1]) == (28.0, 4.0, 8.0)  # added, not set


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gram_over_chunks_is_the_product(dtype):
    rows = np.random.default_rng(3).normal(size=(6, 2 * GRAM_CHUNK + 77)).astype(dtype)
    out = np.zeros((8, 8))
    add_gram(rows, np.arange(6), 5, rows.shape[1], dtype(0), out)
    exact = rows[:, 5:].astype(np.float64) @ rows[:, 5:].T.astype(np.float64)
    # Unreordered float32 sums (NUMBA_DISABLE_JIT=1, as the mutation runs have it) err by 2e-7 of the diagonal's 4200.
    np.testing.assert_allclose(np.triu(out[:6, :6]), np.triu(exact), atol=4e-3 if dtype is np.float32 else 1e-9)


def test_sums_across_chunks_are_float64():
    rows = np.ones((1, 2 * GRAM_CHUNK), np.float32)
    rows[0, :GRAM_CHUNK] = 4096.0
    out = np.zeros((4, 4))
    add_gram(rows, np.array([0]), 0, rows.shape[1], np.float32(0), out)
    # 2048 * 2^24 = 2^35 and then 2048 * 1 = 2^11, which float32's 24 bits could not hold beside it
    assert out[0, 0] == 2.0**35 + 2.0**11


def test_mixing_by_hand_reads_everything_before_it_writes():
    rows = np.array([[4.0], [8.0], [16.0]], np.float32).repeat(MIX_CHUNK + 3, axis=1)
    index = np.array([[0, 1], [1, 2], [2, 0]])
    shares = np.array([[1.0, 0.25]] * 3, np.float32)
    mix(rows, np.arange(3), index, shares, 0, rows.shape[1], np.empty((3, MIX_CHUNK), np.float32))
    assert (rows[:, 0] == [5.0, 10.0, 13.0]).all()  # 4+(8-4)/4, 8+(16-8)/4, 16+(4-16)/4: the old 4, not the new 5
    assert (rows == rows[:, :1]).all()


def one_step(own, other, share):
    """Return `own` after a step towards `other`."""
    rows, size = np.stack([own, other]), len(own)
    shares = np.array([[1.0, share]], rows.dtype)
    mix(rows, np.array([0]), np.array([[0, 1]]), shares, 0, size, np.empty((2, MIX_CHUNK), rows.dtype))
    return rows[0]


def test_a_share_of_one_copies_and_equal_values_stay():
    own, other = np.random.default_rng(1).normal(size=(2, 500)).astype(np.float32)
    assert one_step(own, other, 1.0).tobytes() == other.tobytes()
    assert one_step(own, other, 0.0).tobytes() == own.tobytes()
    for share in (0.3, 0.5, 0.7):
        assert one_step(own, own.copy(), share).tobytes() == own.tobytes()


def test_a_step_starts_from_the_nearer_end():
    own, other = np.random.default_rng(2).normal(size=(2, 500)).astype(np.float32)
    small, large = np.float32(0.25), np.float32(0.75)
    np.testing.assert_array_equal(one_step(own, other, 0.25), own + small * (other - own))
    np.testing.assert_array_equal(one_step(own, other, 0.75), other - small * (other - own))
    assert (one_step(own, other, 0.75) != own + large * (other - own)).any()  # from the other end it is another number


def test_what_is_copied_stays_even_if_it_is_not_finite():
    rows = np.array([[1.0, 2.0, 3.0], [np.inf, -np.inf, np.nan]], np.float32)
    mix(rows, np.array([0]), np.array([[1]]), np.ones((1, 1), np.float32), 0, 3, np.empty((2, MIX_CHUNK), np.float32))
    assert rows[0].tobytes() == rows[1].tobytes()


def test_two_rows_change_places_over_several_chunks():
    """Each of two targets has its own source, also behind the first chunk."""
    rows = np.arange(2 * (2 * MIX_CHUNK + 5), dtype=np.float32).reshape(2, -1)
    before = rows.copy()
    shares, scratch = np.ones((2, 1), np.float32), np.empty((2, MIX_CHUNK), np.float32)
    mix(rows, np.arange(2), np.array([[1], [0]]), shares, 0, rows.shape[1], scratch)
    np.testing.assert_array_equal(rows, before[::-1])
