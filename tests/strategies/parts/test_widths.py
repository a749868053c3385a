"""Which slot has which width, and which slots find a device."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedcross.strategies.parts.widths import Widths, asked, assign, described, holds
from fedcross.tasks.models.width import FULL, Width

LEVELS = [1.0, 0.66, 0.4]


def test_slots_are_dealt_by_the_shares_and_every_width_has_one():
    def widths(k, *shares):
        return [size.ratio for size in Widths(widths=(0.4, 1.0, 0.66), shares=shares).slots(k)]

    assert widths(10, 0.3, 0.4, 0.3) == [1.0] * 4 + [0.66] * 3 + [0.4] * 3
    assert widths(6) == [1.0] * 2 + [0.66] * 2 + [0.4] * 2
    assert widths(3, 0.98, 0.01, 0.01) == [1.0, 0.66, 0.4]
    assert Widths(widths=(1.0, 0.4)).slots(3) == [FULL, FULL, Width(0.4)]
    assert Widths().slots(2) == []


@pytest.mark.parametrize(
    ("shares", "counts"),
    [
        ((0.32, 0.3, 0.38), [2, 1, 2]),  # 1.6, 1.5 and 1.9 slots: the last one is rounded up, then the first
        ((0.04, 0.04, 0.52, 0.4), [1, 1, 2, 1]),  # 0.2, 0.2, 2.6 and 2.0: the first two have one, the last gives one
        ((0.4, 0.4, 0.1, 0.1), [1, 2, 1, 1]),  # 2, 2, 0.5 and 0.5: of two alike the first gives one
        ((), [3, 2]),  # of two alike the first is rounded up
    ],
)
def test_what_does_not_divide_goes_to_the_largest_remainders(shares, counts):
    widths = (1.0, 0.8, 0.6, 0.4)[: len(counts)]
    assert [size.ratio for size in Widths(widths=widths, shares=shares).slots(5)] == [
        width for width, count in zip(widths, counts) for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"widths": [0.0]}, "greater than 0"),
        ({"widths": [1.5]}, "less than or equal to 1"),
        ({"widths": [1.0, 1.0]}, "there twice"),
        ({"widths": [1.0, 0.5], "shares": [1.0]}, "one for each"),
        ({"widths": [1.0, 0.5], "shares": [0.5, 0.6]}, "sum to 1"),
        ({"shares": [1.0]}, "shares is for models of several widths"),
        ({"widths": [1.0, 0.5], "nested_steps": "all"}, "nested_steps=all"),
        ({"nested": True}, "nested is for models of several widths"),
        ({"whole": 2}, "whole is for models of several widths"),
    ],
)
def test_bad_widths_are_refused(values, said):
    with pytest.raises(ValidationError, match=re.escape(said)):
        Widths.model_validate(values)


def test_a_size_travels_in_the_scalars_of_a_request():
    for size in (FULL, Width(0.4), Width(0.66, 2)):
        assert asked(described(size)) == size
    assert described(FULL) == {}
    assert Width(0.66, 2).text == "0.66@2"
    assert holds(0.66, Width(0.66))
    assert not holds(0.65, Width(0.66))


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(LEVELS), min_size=1, max_size=5),
    st.lists(st.sampled_from(LEVELS), min_size=0, max_size=5),
    st.randoms(use_true_random=False),
)
def test_as_many_slots_as_possible_find_a_device_and_the_first_claims_win(slots, budgets, random):
    sizes = [Width(width) for width in slots]
    queue = random.sample(range(len(sizes)), len(sizes))
    clients = dict(zip(range(100, 105), budgets))
    dealt = assign(queue, sizes, clients)

    def possible(some):
        return any(
            all(holds(budgets[c], sizes[s]) for s, c in zip(some, order))
            for order in itertools.permutations(range(len(budgets)), len(some))
        )

    best = max(
        n for n in range(len(sizes) + 1) if any(possible(c) for c in itertools.combinations(range(len(sizes)), n))
    )
    assert len(dealt) == best
    first: list[int] = []
    for slot in queue:  # by hand: take a slot whenever it still fits beside those before it
        first += [slot] if possible([*first, slot]) else []
    assert list(dealt) == sorted(first)
    assert len(set(dealt.values())) == len(dealt)
    assert all(holds(clients[c], sizes[s]) for s, c in dealt.items())


def test_equal_slots_go_to_the_clients_in_their_order():
    assert assign([2, 0, 1], [FULL] * 3, {7: 1.0, 5: 1.0, 9: 1.0}) == {0: 7, 1: 5, 2: 9}
