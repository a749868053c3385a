"""The memory-bound loops: accuracy of the Gram matrix, and both implementations against plain numpy."""

import numpy as np
import pytest

from fedcross.strategies.pool import loops
from fedcross.strategies.pool.mixing import cosine, select

RNG = np.random.default_rng(0)


@pytest.fixture(params=["torch", "numba"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(loops, "COMPILED_BYTES", 2**60 if request.param == "torch" else 1)


@pytest.mark.parametrize("spread", [0.01, 0.003, 0.001])
def test_collaborators_in_float32_are_those_in_float64(implementation, spread):
    """K = 10, d = 62,006; 50 draws of a collaborator for each spread."""
    for _ in range(5):
        centre = RNG.standard_normal(62_006)
        rows = (centre + spread * RNG.standard_normal((10, 62_006))).astype(np.float32)
        exact = rows.astype(np.float64) @ rows.astype(np.float64).T
        for name in ("lowest_similarity", "highest_similarity"):
            found = loops.gram(rows, np.arange(10), slice(0, 62_006))
            chosen = [select(name, 10, 1, 0, cosine(one)) for one in (found, exact)]
            np.testing.assert_array_equal(*chosen)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 10])
def test_gram_of_some_rows_and_columns(implementation, m):
    rows = RNG.standard_normal((10, 3001)).astype(np.float32)
    members, part = RNG.permutation(10)[:m], rows[:, 7:2999].astype(np.float64)
    found = loops.gram(rows, members, slice(7, 2999))
    np.testing.assert_allclose(found, part[members] @ part[members].T, rtol=1e-5, atol=4e-3)


def test_a_model_that_is_not_finite_does_not_spoil_the_others(implementation):
    rows = RNG.standard_normal((4, 100)).astype(np.float32)
    rows[0, 3] = np.nan
    found = loops.gram(rows, np.arange(4), slice(0, 100))
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:, 1:], rows[1:] @ rows[1:].T, rtol=1e-5, atol=1e-4)


def test_mix_is_a_matrix_product_and_keeps_what_all_share(implementation):
    rows = RNG.standard_normal((6, 2500)).astype(np.float32)
    rows[:, 11] = 0.1
    matrix = RNG.dirichlet(np.ones(6), 6)
    matrix[[1, 4]] = np.eye(6)[[1, 4]]
    before = rows.copy()
    loops.mix(rows, matrix)
    np.testing.assert_allclose(rows, matrix @ before, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rows[[1, 4]], before[[1, 4]])
    np.testing.assert_array_equal(rows[:, 11], before[:, 11])


def test_mean_is_summed_in_float64():
    rows = np.array([[2.0**24], [1.0], [1.0]], np.float32)
    out = np.empty(1, np.float32)
    loops.mean(rows, np.arange(3), out)
    assert out[0] == np.float32((2.0**24 + 2) / 3)
