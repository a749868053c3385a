"""Mixing matrices: by hand, row sums, reductions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.pool import mixing
from fedcross.strategies.pool.mixing import SELECTIONS, Question


def test_cross_by_hand_with_an_idle_slot():
    """Slots 0, 2, 3 of four take part, co = (1, 2, 0) in positions: 0 -> 2, 2 -> 3, 3 -> 0."""
    matrix = mixing.cross(4, [0, 2, 3], [1, 2, 0], 0.75)
    assert matrix.dense().tolist() == [[0.75, 0, 0.25, 0], [0, 1, 0, 0], [0, 0, 0.75, 0.25], [0.25, 0, 0, 0.75]]
    assert matrix.targets.tolist() == [0, 2, 3]


def test_a_model_that_is_its_own_partner_stays():
    assert mixing.cross(2, [0, 1], [0, 1], 0.7) == mixing.identity(2)
    assert mixing.cross(3, range(3), [1, 2, 0], 1.0) == mixing.identity(3)
    assert mixing.cross(3, range(3), [1, 2, 0], 0.0) == mixing.routing(3, range(3), [1, 2, 0])
    assert mixing.identity(3).targets.tolist() == []


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
    half = mixing.propellers(4, range(4), [1, 2], 0.5).dense()
    assert half.tolist() == [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.25, 0.25], [0.25, 0, 0.5, 0.25], [0.25, 0.25, 0, 0.5]]
    equal = mixing.propellers(4, range(4), [1, 2], None).dense()
    np.testing.assert_allclose(equal[0], [1 / 3, 1 / 3, 1 / 3, 0])
    np.testing.assert_allclose(equal.sum(0), 1)


def test_uniform_by_hand():
    assert mixing.uniform(3, [0, 2]).dense().tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]]
    assert mixing.uniform(3, [1]) == mixing.identity(3)


@pytest.mark.slow
@settings(deadline=None)
@given(m=st.integers(0, 9), round_number=st.integers(1, 50), alpha=st.floats(0, 1))
def test_one_propeller_is_in_order(m, round_number, alpha):
    partners = SELECTIONS["in_order"](Question(m, round_number))
    one = mixing.propellers(m + 2, range(1, m + 1), mixing.offsets(m, 1, round_number), alpha)
    assert one == mixing.cross(m + 2, range(1, m + 1), partners, alpha)


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
    for name in [*permutations, *sorted(SELECTIONS.keys() - set(permutations))]:
        partners = SELECTIONS[name](Question(m, round_number, seed, similarity))
        matrices.append(mixing.cross(k, members, partners, alpha))
        if name in permutations:
            matrices.append(mixing.routing(k, members, partners))
            doubly += 2
    idle = sorted(set(range(k)) - set(members))
    for matrix in matrices:
        dense = matrix.dense()
        np.testing.assert_allclose(dense.sum(1), 1, atol=1e-12)
        np.testing.assert_array_equal(dense[idle], np.eye(k)[idle])
        assert not dense[np.ix_(members, idle)].any()
        assert set(matrix.targets.tolist()) <= set(members)
    for matrix in matrices[:doubly]:
        np.testing.assert_allclose(matrix.dense().sum(0), 1, atol=1e-12)


def test_padding_puts_the_own_model_first():
    """Row 0 has three sources, row 2 two, row 1 stays: the short row is padded with weight 0 of its first source."""
    matrix = mixing.Mixing(({1: 0.25, 0: 0.5, 2: 0.25}, {1: 1.0}, {0: 0.5, 2: 0.5}))
    index, weight = matrix.padded()
    assert index.tolist() == [[0, 1, 2], [2, 0, 2]]
    assert weight.tolist() == [[0.5, 0.25, 0.25], [0.5, 0.5, 0]]
    index, weight = mixing.Mixing(({2: 0.125, 1: 0.375, 0: 0.5}, {1: 1.0}, {2: 1.0})).padded()  # by slot, not by weight
    assert (index.tolist(), weight.tolist()) == ([[0, 1, 2]], [[0.5, 0.375, 0.125]])
    for m in (2, 3):  # all targets become the same model: one row for all of them
        index, weight = mixing.uniform(3, range(m)).padded()
        assert (index.tolist(), weight.tolist()) == ([list(range(m))], [[1 / m] * m])
    index, weight = mixing.Mixing(({0: 1.0}, {1: 1.0}, {0: 0.25, 2: 0.75})).padded()  # a single target
    assert (index.tolist(), weight.tolist()) == ([[2, 0]], [[0.75, 0.25]])


def test_shares_of_propellers_by_hand():
    """Two propellers, alpha .9: equal leaves it to 1/(P + 1); each gets .1, so 1 - 2 * .1 = .8 stay; alpha keeps .9."""
    assert mixing.propeller_share("equal", 0.9, 2) is None
    assert mixing.propeller_share("each", 0.9, 2) == pytest.approx(0.8)
    assert mixing.propeller_share("alpha", 0.9, 2) == 0.9
