"""Mixing matrices: by hand, row sums, reductions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.pool import mixing
from fedcross.strategies.pool.loops import sources
from fedcross.strategies.pool.mixing import SELECTIONS, select


def test_cross_by_hand_with_an_idle_slot():
    """Slots 0, 2, 3 of four take part, co = (1, 2, 0) in positions: 0 -> 2, 2 -> 3, 3 -> 0."""
    matrix = mixing.cross(4, [0, 2, 3], [1, 2, 0], 0.75)
    assert matrix.tolist() == [[0.75, 0, 0.25, 0], [0, 1, 0, 0], [0, 0, 0.75, 0.25], [0.25, 0, 0, 0.75]]
    assert sources(matrix)[0].tolist() == [0, 2, 3]


def test_a_model_that_is_its_own_partner_stays():
    assert (mixing.cross(2, [0, 1], [0, 1], 0.7) == np.eye(2)).all()
    assert (mixing.cross(3, range(3), [1, 2, 0], 1.0) == np.eye(3)).all()
    assert (mixing.cross(3, range(3), [1, 2, 0], 0.0) == np.eye(3)[[1, 2, 0]]).all()
    assert sources(np.eye(3))[0].tolist() == []


def test_offsets_by_hand():
    """m = 5: distances 1..4. Round 1 starts at 1, round 4 at 4 and goes on at 1, round 5 at 1 again."""
    assert mixing.offsets(5, 2, 1) == [1, 2]
    assert mixing.offsets(5, 2, 4) == [4, 1]
    assert mixing.offsets(5, 3, 5) == [1, 2, 3]
    assert mixing.offsets(3, 9, 2) == [2, 1]
    assert mixing.offsets(1, 2, 1) == []
    assert mixing.offsets(0, 2, 1) == []


def test_propellers_by_hand():
    """m = 4, offsets 1 and 2, alpha = 0.5: 0.25 for each propeller; equal weights: 1/3 for all three."""
    half = mixing.propellers(4, range(4), [1, 2], 0.5)
    assert half.tolist() == [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.25, 0.25], [0.25, 0, 0.5, 0.25], [0.25, 0.25, 0, 0.5]]
    equal = mixing.propellers(4, range(4), [1, 2], None)
    np.testing.assert_allclose(equal[0], [1 / 3, 1 / 3, 1 / 3, 0])
    np.testing.assert_allclose(equal.sum(0), 1)


def test_how_often_each_model_was_chosen_by_hand():
    """Model 1 goes into 0 and 2, model 2 into 1; slot 2 does not count where it is no member."""
    matrix = np.array([[0.9, 0.1, 0], [0, 0.9, 0.1], [0, 0.1, 0.9]])
    found = mixing.chosen(matrix, [0, 1, 2])
    assert found == {"chosen_most": 2, "chosen_models": 2, "chosen_0": 0, "chosen_1": 2, "chosen_2": 1}
    assert mixing.chosen(matrix, [0, 1])["chosen_1"] == 1
    assert mixing.chosen(matrix, []) == {}


def test_uniform_by_hand():
    assert mixing.uniform(3, [0, 2]).tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]]
    assert (mixing.uniform(3, [1]) == np.eye(3)).all()


@pytest.mark.slow
@settings(deadline=None)
@given(m=st.integers(0, 9), round_number=st.integers(1, 50), alpha=st.floats(0, 1))
def test_one_propeller_is_in_order(m, round_number, alpha):
    partners = select("in_order", m, round_number, 0)
    one = mixing.propellers(m + 2, range(1, m + 1), mixing.offsets(m, 1, round_number), alpha)
    np.testing.assert_array_equal(one, mixing.cross(m + 2, range(1, m + 1), partners, alpha))


@pytest.mark.slow
@settings(deadline=None)
@given(
    k=st.integers(1, 9),
    data=st.data(),
    alpha=st.floats(0, 1),
    count=st.integers(1, 9),
    round_number=st.integers(1, 99),
    seed=st.integers(0, 99),
)
def test_every_matrix_is_row_stochastic_and_leaves_idle_slots(k, data, alpha, count, round_number, seed):
    members = sorted(data.draw(st.sets(st.integers(0, k - 1))))
    m = len(members)
    distances = mixing.offsets(m, count, round_number)
    matrices = [
        mixing.propellers(k, members, distances, alpha),
        mixing.propellers(k, members, distances, None),
        mixing.uniform(k, members),
    ]
    doubly = len(matrices)
    similarity = np.random.default_rng(seed).normal(size=(m, m))
    permutations = ["in_order", "random", "least_similar_derangement"]
    for name in [*permutations, *sorted(set(SELECTIONS) - set(permutations))]:
        partners = select(name, m, round_number, seed, similarity)
        matrices.append(mixing.cross(k, members, partners, alpha))
        if name in permutations:
            matrices.append(mixing.cross(k, members, partners, 0.0))
            doubly += 2
    idle = sorted(set(range(k)) - set(members))
    for matrix in matrices:
        dense = matrix
        np.testing.assert_allclose(dense.sum(1), 1, atol=1e-12)
        np.testing.assert_array_equal(dense[idle], np.eye(k)[idle])
        assert not dense[np.ix_(members, idle)].any()
        assert set(sources(matrix)[0].tolist()) <= set(members)
    for matrix in matrices[:doubly]:
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)


def test_padding_puts_the_own_model_first():
    """Row 0 has three sources, row 2 two, row 1 stays: the short row is padded with weight 0 of its first source."""
    _, index, weight = sources(np.array([[0.5, 0.25, 0.25], [0, 1, 0], [0.5, 0, 0.5]]))
    assert index.tolist() == [[0, 1, 2], [2, 0, 2]]
    assert weight.tolist() == [[0.5, 0.25, 0.25], [0.5, 0.5, 0]]
    for m in (2, 3):  # all targets become the same model: one row for all of them
        _, index, weight = sources(mixing.uniform(3, range(m)))
        assert (index.tolist(), weight.tolist()) == ([list(range(m))], [[1 / m] * m])
    _, index, weight = sources(np.array([[1, 0, 0], [0, 1, 0], [0.25, 0, 0.75]]))  # a single target
    assert (index.tolist(), weight.tolist()) == ([[2, 0]], [[0.75, 0.25]])
