"""Similarity measures, worked by hand."""

import numpy as np
import pytest

from fedcross.strategies.pool import loops, mixing
from fedcross.strategies.pool.mixing import FROM_GRAM
from fedcross.strategies.pool.pool import Layout, Pool

F = np.float32
SIMILARITIES = [*FROM_GRAM, "manhattan", "chunked"]


def similarity(*what):
    return mixing.similarity(*what)[0]


def pool_of(models, parameters=None):
    models = [{name: np.asarray(a, None if name == "count" else F) for name, a in m.items()} for m in models]
    pool = Pool(Layout.of(models[0], parameters), len(models))
    for i, model in enumerate(models):
        pool.write(i, model)
    return pool


# x = (3, 4), y = (0, 5), z = (0, 0): |x| = |y| = 5, <x, y> = 20, |x - y| = |(3, -1)| = sqrt(10), sum |x - y| = 4.
PLANE = pool_of([{"w": [3, 4]}, {"w": [0, 5]}, {"w": [0, 0]}])


@pytest.mark.parametrize(
    ("name", "xy", "xz", "xx"),
    [
        ("cosine", 20 / 25, 0, 1),
        ("paper", 20 / (5 + 5), 0, 25 / 10),
        ("euclidean", -np.sqrt(10), -5, 0),
        ("manhattan", -4, -7, 0),
        ("chunked", 20 / 25, 0, 1),  # one entry: it is the odd one, counted once
    ],
)
def test_measures_by_hand(name, xy, xz, xx):
    matrix = similarity(name, PLANE, [0, 1, 2], "state")
    assert matrix.dtype == np.float64
    assert matrix.shape == (3, 3)
    np.testing.assert_allclose([matrix[0, 1], matrix[0, 2], matrix[0, 0]], [xy, xz, xx], rtol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)


def test_parameters_or_the_whole_state():
    """Parameters (1, 0) and (1, 0) agree; with the buffer (1, 0 | 0) and (1, 0 | 1) the cosine is 1 / sqrt(2)."""
    pool = pool_of([{"w": [1, 0], "mean": [0]}, {"w": [1, 0], "mean": [1]}], ["w"])
    assert similarity("cosine", pool, [0, 1], "parameters")[0, 1] == pytest.approx(1)
    assert similarity("cosine", pool, [0, 1], "state")[0, 1] == pytest.approx(0.5**0.5)
    assert similarity("manhattan", pool, [0, 1], "parameters")[0, 1] == 0
    assert similarity("manhattan", pool, [0, 1], "state")[0, 1] == -1
    assert similarity("euclidean", pool, [0, 1], "state")[0, 1] == pytest.approx(-1)


def test_chunked_with_an_odd_number_of_entries():
    """Entries a, b, c, joined (a b) and (c).

    a: (1, 0) / (0, 1) product 0, squares 1, 1; b: 2 / 2 product 4, squares 4, 4: cos (a b) = 4 / 5.
    c: 1 / -1: cos -1, added once. Sum -0.2.
    """
    pool = pool_of([{"a": [1, 0], "b": [2], "c": [1]}, {"a": [0, 1], "b": [2], "c": [-1]}])
    assert similarity("chunked", pool, [0, 1], "state")[0, 1] == pytest.approx(-0.2)


def test_chunked_with_an_even_number_counts_the_last_pair_twice():
    """As above with d: 2 / 2 joined to c: product -1 + 4 = 3, squares 5, 5: cos 3/5, added twice: 0.8 + 1.2 = 2."""
    pool = pool_of([{"a": [1, 0], "b": [2], "c": [1], "d": [2]}, {"a": [0, 1], "b": [2], "c": [-1], "d": [2]}])
    assert similarity("chunked", pool, [0, 1], "state")[0, 1] == pytest.approx(2)


def test_chunked_walks_the_state_dict_with_buffers_and_counters():
    """A batch normalisation: weight 3 / 4, mean 4 / 3, count 10 / 10, in this order, although the row is reordered.

    (weight mean) = (3, 4) and (4, 3): 24 / 25. The counter is the odd entry: cos 1. Sum 1.96.
    Over parameters there is the weight alone: cos 1.
    """
    pool = pool_of([{"mean": [4], "weight": [3], "count": 10}, {"mean": [3], "weight": [4], "count": 10}], ["weight"])
    assert similarity("chunked", pool, [0, 1], "state")[0, 1] == pytest.approx(1.96)
    assert similarity("chunked", pool, [0, 1], "parameters")[0, 1] == pytest.approx(1)


def test_equal_models_are_at_distance_0_whatever_rounding_says():
    """1 + 1 - 2 (1 + 1e-9) is below 0: the product came out too large, the models are the same."""
    gram = np.array([[1, 1 + 1e-9], [1 + 1e-9, 1]])
    assert FROM_GRAM["euclidean"](gram).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("name", SIMILARITIES)
def test_many_blocks_against_float64(name, monkeypatch):
    monkeypatch.setattr(loops, "BLOCK_BYTES", 1)
    values = np.random.default_rng(1).normal(size=(4, 1000)).astype(F)
    x = values.astype(np.float64)
    norms = np.linalg.norm(x, axis=1)
    exact = {
        "cosine": x @ x.T / np.outer(norms, norms),
        "chunked": x @ x.T / np.outer(norms, norms),
        "paper": x @ x.T / (norms[:, None] + norms[None]),
        "euclidean": -np.linalg.norm(x[:, None] - x[None], axis=2),
        "manhattan": -np.abs(x[:, None] - x[None]).sum(2),
    }[name]
    matrix = similarity(name, pool_of([{"w": row} for row in values]), range(4), "state")
    np.testing.assert_allclose(matrix, exact, rtol=1e-5, atol=1e-2 if name == "euclidean" else 1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_a_model_that_is_not_finite_cannot_be_compared(name, bad):
    pool = pool_of([{"w": [3, 4]}, {"w": [0, 5]}, {"w": [bad, 1]}])
    matrix = similarity(name, pool, [0, 1, 2], "state")
    assert np.isfinite(matrix[:2, :2]).all()
    assert not np.isfinite(matrix[2]).any()
