"""Who collaborates with whom, worked by hand."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.core.errors import ConfigError
from fedcross.strategies.pool.mixing import SELECTIONS, select

NAN = float("nan")
# Off-diagonal: 0 is nearest to 2 (.9) and farthest from 1 (.1); 1 ties 0 and 3 at .1; 2 ties 1 and 3 at .4.
SIMILARITY = np.array(
    [
        [1.0, 0.1, 0.9, 0.5],
        [0.1, 1.0, 0.4, 0.1],
        [0.9, 0.4, 1.0, 0.4],
        [0.5, 0.1, 0.4, 1.0],
    ]
)


def choose(name, m, round_number=1, similarity=None, seed=0):
    return select(name, m, round_number, seed, similarity).tolist()


def test_in_order_by_hand():
    """m = 4, r = round - 1: r mod 3 + 1 is 1, 2, 3, 1 in rounds 1 to 4."""
    assert choose("in_order", 4, 1) == [1, 2, 3, 0]
    assert choose("in_order", 4, 2) == [2, 3, 0, 1]
    assert choose("in_order", 4, 3) == [3, 0, 1, 2]
    assert choose("in_order", 4, 4) == [1, 2, 3, 0]


@pytest.mark.parametrize("m", [2, 3, 5, 10])
def test_in_order_meets_each_ordered_pair_once_in_m_minus_1_rounds(m):
    met = Counter((i, co) for r in range(1, m) for i, co in enumerate(choose("in_order", m, r)))
    assert met == Counter(permutations(range(m), 2))


def test_highest_and_lowest_by_hand():
    assert choose("highest_similarity", 4, similarity=SIMILARITY) == [2, 2, 0, 0]
    assert choose("lowest_similarity", 4, similarity=SIMILARITY) == [1, 0, 1, 1]  # ties of 1 and 2: the lowest slot


@pytest.mark.parametrize("name", ["highest_similarity", "lowest_similarity", "least_similar_derangement"])
def test_nan_never_wins(name):
    """Model 2 is not comparable with anybody: nobody takes it, and it keeps its own model."""
    similarity = SIMILARITY.copy()
    similarity[2, :] = similarity[:, 2] = NAN
    partners = choose(name, 4, similarity=similarity)
    assert partners[2] == 2
    assert 2 not in partners[:2] + partners[3:]
    assert choose(name, 3, similarity=np.full((3, 3), NAN)) == [0, 1, 2]


def test_least_similar_derangement_by_hand():
    """The 9 derangements of 4 and their sums, as co(0)co(1)co(2)co(3).

    1032: .1+.1+.4+.4 = 1.0   1230: .1+.4+.4+.5 = 1.4   1302: .1+.1+.9+.4 = 1.5
    2031: .9+.1+.4+.1 = 1.5   2301: .9+.1+.9+.1 = 2.0   2310: .9+.1+.4+.5 = 1.9
    3012: .5+.1+.4+.4 = 1.4   3201: .5+.4+.9+.1 = 1.9   3210: .5+.4+.4+.5 = 1.8
    """
    assert choose("least_similar_derangement", 4, similarity=SIMILARITY) == [1, 0, 3, 2]


def test_least_similar_derangement_leaves_an_unavoidable_unknown_pair_unmixed():
    """Three models, 0 comparable with neither: 1 and 2 take each other, 0 keeps its own."""
    similarity = np.array([[1, NAN, NAN], [NAN, 1, 0.5], [NAN, 0.5, 1]])
    assert choose("least_similar_derangement", 3, similarity=similarity) == [0, 2, 1]


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), m=st.integers(2, 5))
def test_least_similar_derangement_is_the_best_permutation_whatever_is_unknown(data, m):
    """Of all permutations without an unknown pair: as few as possible keep their own, then the least total."""
    values = st.one_of(st.sampled_from([NAN, np.inf, -np.inf]), st.integers(-3, 3).map(float))
    similarity = np.array(data.draw(st.lists(values, min_size=m * m, max_size=m * m))).reshape(m, m)

    def rank(partners):
        taken = [similarity[i, j] for i, j in enumerate(partners) if i != j]
        return (m - len(taken), sum(taken)) if np.isfinite(taken).all() else (m + 1, 0.0)

    partners = choose("least_similar_derangement", m, similarity=similarity)
    assert sorted(partners) == list(range(m))
    assert rank(partners) == min(map(rank, permutations(range(m))))


def test_random_is_a_derangement_keyed_by_seed_and_round():
    draws = [choose("random", 4, r, seed=3) for r in range(1, 1801)]
    assert all(sorted(p) == [0, 1, 2, 3] and all(i != j for i, j in enumerate(p)) for p in draws)
    counts = Counter(map(tuple, draws))
    assert len(counts) == 9
    # 1800 draws of 9 equally likely ones: 200 each, standard deviation sqrt(1800 * 8) / 9 = 13.3; five of them.
    assert all(abs(count - 200) < 67 for count in counts.values())
    assert draws[:5] == [choose("random", 4, r, seed=3) for r in range(1, 6)]
    assert draws[:20] != [choose("random", 4, r, seed=4) for r in range(1, 21)]


@pytest.mark.parametrize("name", SELECTIONS)
def test_one_model_keeps_itself_and_two_take_each_other(name):
    assert choose(name, 0, similarity=np.zeros((0, 0))) == []
    assert choose(name, 1, similarity=np.ones((1, 1))) == [0]
    for round_number in (1, 2, 3):
        assert choose(name, 2, round_number, similarity=np.array([[1, 0.3], [0.3, 1]])) == [1, 0]


def test_an_unknown_selection_is_an_error_and_never_a_random_draw():
    with pytest.raises(ConfigError, match="lowest_similarity"):
        select("lowest_similarty", 4, 1, 1, np.eye(4))
    with pytest.raises(ConfigError, match="similarity"):
        select("lowest_similarity", 4, 1, 1)
