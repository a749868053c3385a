import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedcross.core.randomness import stream
from fedcross.strategies.parts import matching

HOME = np.eye(3, dtype=bool)

# Off the diagonal: both models 0 and 1 like client 2 best. Leaving out who stays, the two ways to move everyone are
# 0->1, 1->2, 2->0: 3 + 1 + 9 = 13 and 0->2, 1->0, 2->1: 1 + 2 + 4 = 7.
COSTS = np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [9.0, 4.0, 0.0]])


def test_assignment_takes_the_permutation_of_least_total_cost():
    assert matching.assignment(COSTS, HOME).tolist() == [2, 0, 1]


def test_all_move_also_where_a_swap_of_two_is_cheap():
    """0 and 1 would swap for nothing, and 2 stay; both ways to move everyone cost 20."""
    costs = np.array([[0.0, 0.0, 10.0], [0.0, 0.0, 10.0], [10.0, 10.0, 0.0]])
    assert (matching.assignment(costs, HOME) != np.arange(3)).all()


def test_literal_lets_models_meet():
    # argmin over j != i: 0 -> 2 (1), 1 -> 2 (1), 2 -> 1 (4); client 0 gets none.
    assert matching.literal(COSTS, HOME).tolist() == [2, 2, 1]
    # argmax over j != i: 0 -> 1 (3), 1 -> 0 (2), 2 -> 0 (9).
    assert matching.literal(-COSTS, HOME).tolist() == [1, 0, 0]


def test_greedy_takes_what_is_left():
    # 0 takes 2 (1); 1 would take 0 (2), then 1 is left for model 2: fine, it moves.
    assert matching.greedy(COSTS, HOME).tolist() == [2, 0, 1]
    # Here 0 takes 1; 1 likes 0 (1) better than 2 (5), but then model 2 could only stay: it takes 2.
    costs = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 5.0], [9.0, 4.0, 0.0]])
    assert matching.greedy(costs, HOME).tolist() == [1, 2, 0]
    # The best total is 0->2, 1->0, 2->1: 2 + 1 + 4 = 7 against greedy's 1 + 5 + 9 = 15.
    assert matching.assignment(costs, HOME).tolist() == [2, 0, 1]


def test_who_cannot_move_stays():
    # Model 1's host was lost, so both models are at client 1; exactly one of them has to stay, the cheaper way.
    stay = np.array([[False, True], [False, True]])
    costs = np.array([[5.0, 1.0], [2.0, 1.0]])
    assert matching.assignment(costs, stay).tolist() == [1, 0]  # 2 + 1 against 5 + 1
    assert sorted(matching.greedy(costs, stay).tolist()) == [0, 1]
    assert sorted(matching.random(stay, stream(1, "test")).tolist()) == [0, 1]


def test_of_two_that_could_stay_the_cheaper_one_does():
    # Both models are at client 1. Model 0 stays and 1 goes: 1 + 5 = 6; the other way round: 3 + 5 = 8.
    stay = np.array([[False, True], [False, True]])
    assert matching.assignment(np.array([[5.0, 1.0], [5.0, 3.0]]), stay).tolist() == [1, 0]
    assert matching.assignment(np.array([[5.0, 3.0], [5.0, 1.0]]), stay).tolist() == [0, 1]


square = st.integers(2, 6).flatmap(lambda n: arrays(np.float64, (n, n), elements=st.floats(-20, 20)))


@pytest.mark.slow
@given(square)
def test_assignment_and_greedy_move_everyone_to_another_client(costs):
    n = len(costs)
    stay = np.eye(n, dtype=bool)
    totals = []
    for rule in (matching.assignment, matching.greedy):
        hosts = rule(costs, stay)
        assert sorted(hosts.tolist()) == list(range(n))
        assert not stay[np.arange(n), hosts].any()
        totals.append(costs[np.arange(n), hosts].sum())
    assert totals[0] <= totals[1] + 1e-9


def test_random_is_uniform_over_derangements():
    # Four models have 9 derangements; 1,800 draws give 200 each, standard deviation sqrt(1800 * 1/9 * 8/9) = 13.3.
    counts: dict[tuple[int, ...], int] = {}
    for draw in range(1800):
        hosts = tuple(matching.random(np.eye(4, dtype=bool), stream(7, "test", draw)).tolist())
        counts[hosts] = counts.get(hosts, 0) + 1
    assert len(counts) == 9
    assert all(abs(count - 200) < 5 * 13.3 for count in counts.values())
    assert all(host != slot for hosts in counts for slot, host in enumerate(hosts))


def test_consistency_by_hand():
    # H(z) = z + (0, 0, 1). Class 0: logits (2, 0, 1), class 2: logits (0, 0, 4); class 1 is absent and does not count.
    vectors = np.array([[2.0, 0.0, 0.0], [50.0, 0.0, 0.0], [0.0, 0.0, 3.0]], np.float32)
    present = np.array([True, False, True])
    weight, bias = np.eye(3, dtype=np.float32), np.array([0.0, 0.0, 1.0], np.float32)
    first = math.log(math.exp(2) + 1 + math.e) - 2
    second = math.log(1 + 1 + math.exp(4)) - 4
    assert matching.consistency(weight, bias, vectors, present) == pytest.approx((first + second) / 2, rel=1e-7)


def test_consistency_without_classes_or_bias():
    weight = np.eye(2, dtype=np.float32)
    nothing = np.zeros(2, bool)
    assert matching.consistency(weight, None, np.ones((2, 2), np.float32), nothing) == 0.0
    # A class that is not recognised: logits (0, 1) for class 0 cost ln(1 + e).
    wrong = np.array([[0.0, 1.0], [0.0, 0.0]], np.float32)
    assert matching.consistency(weight, None, wrong, np.array([True, False])) == pytest.approx(math.log(1 + math.e))
    # Huge logits stay finite: class 0 with logits (1000, 0) costs 0.
    vectors = np.array([[1000.0, 0.0], [0.0, 0.0]], np.float32)
    assert matching.consistency(weight, None, vectors, np.array([True, False])) == 0.0
