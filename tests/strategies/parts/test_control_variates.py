"""Control variates of the clients: the shares by hand, what they do to a mean and its variance, memory, resume."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.strategies.method import Upload
from fedcross.strategies.parts.control_variates import AGE, DECAY, ControlVariates
from fedcross.strategies.pool.pool import Layout

START = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32), "mean": np.zeros(1, np.float32)}
MIB = 1 << 20


def begun(limit=MIB):
    return ControlVariates(Layout.of(START, {"w", "b"}), limit)


def total(variates):
    return np.sum(list(variates.rows.values()), axis=0).tolist()


def upload(client, w, b=0.0, mean=0.0):
    arrays = {"w": np.float32(w), "b": np.float32([b]), "mean": np.float32([mean])}
    return Upload(client, 0, arrays, {}, 1, {})


def correct(variates, *uploads):
    """Return the corrected entries `w` and `b` of uploads from the model of zeros."""
    return [(u.arrays["w"].tolist(), u.arrays["b"].tolist()) for u in variates.correct(uploads, lambda slot: START)]


def test_two_rounds_by_hand():
    """Round 1: (1, 0) and (3, 0): Y = (2, 0). Round 2: client 0 goes (1.5, 0), .5 below Y instead of 1: s = 1/2.

    Entry b has not differed, so its s is 0. The change differs by (-.5, 0) and 4 in b, its last one by less, (-1, 0),
    so b = 1. The correction is -1/2 (1 - 2) = .5. Round 3 finds Y = (1.5 + 3)/2.
    """
    variates = begun()
    assert correct(variates, upload(0, [1, 0]), upload(1, [3, 0])) == [([1, 0], [0]), ([3, 0], [0])]
    assert variates.share.tolist() == [0, 0]
    assert correct(variates, upload(0, [1.5, 0], b=4)) == [([2, 0], [4])]
    assert variates.share.tolist() == [0.5, 0]
    assert variates.recalled() == 0.5
    # Round 3, Y = (2.25, 0, 2): client 1 differed by (.75, 0, -2) and comes (2.25, 0, 0): (0, 0, -2), which is shorter.
    corrected = correct(variates, upload(1, [2.25, 0]))
    share, bound = DECAY * 0.5 / (DECAY * 1 + 0.75**2), 2 / math.hypot(0.75, 2)
    assert variates.share.tolist() == pytest.approx([share, 1])
    assert corrected == [([pytest.approx(2.25 - share * bound * 0.75), 0], [pytest.approx(2 * bound)])]


def test_no_more_is_taken_off_than_the_change_differs_now():
    """Client 0 was out of measure, 100 with Y = 50. It comes to 51, by 1 above Y: at most that goes, not 50."""
    variates = begun()
    correct(variates, upload(0, [100, 0]), upload(1, [0, 0]))
    for _ in range(8):
        correct(variates, upload(1, [0, 0]))
    ((w, _),) = correct(variates, upload(0, [51, 0]))
    assert variates.share[0] > 0.7
    assert w == [pytest.approx(51 - variates.share[0]), 0]


def test_statistics_and_strangers_stay_as_they_are():
    variates = begun()
    correct(variates, upload(0, [1, 0], mean=5), upload(1, [3, 0], mean=7))
    known, stranger = variates.correct([upload(0, [1, 0], mean=5), upload(9, [8, 8], mean=1)], lambda slot: START)
    assert known.arrays["mean"] == 5
    assert stranger.arrays["w"].tolist() == [8, 8]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 6), st.integers(0, 99))
def test_clients_that_always_do_the_same_come_to_the_mean_of_all(clients, seed):
    """With constant changes every corrected upload is the mean change of all clients, whoever takes part."""
    generator = np.random.default_rng(seed)
    habits = generator.normal(size=(clients, 2)).astype(np.float32)
    variates = begun()
    correct(variates, *(upload(client, habit) for client, habit in enumerate(habits)))
    for client in generator.permutation(clients)[:2]:
        ((w, _),) = correct(variates, upload(int(client), habits[client]))
        np.testing.assert_allclose(w, habits.mean(0), rtol=0, atol=1e-5)


def test_a_client_that_has_stopped_coming_is_forgotten():
    """Two clients known: 20 uploads of the other are too many. Then it is a stranger again."""
    variates = begun()
    correct(variates, upload(0, [100, 0]), upload(1, [1, 0]))
    for _ in range(AGE * 2 - 1):
        correct(variates, upload(1, [1, 0]))
    assert list(variates.rows) == [0, 1]
    correct(variates, upload(1, [1, 0]))
    assert correct(variates, upload(1, [1, 0])) == [([1, 0], [0])]
    assert variates.rows.keys() == variates.heard.keys() == {1}
    assert total(variates) == [1, 0, 0]


def test_the_client_heard_least_recently_is_forgotten():
    """Room for two clients of three values each."""
    variates = begun(limit=2 * 3 * 4)
    for client in (0, 1, 0, 2):
        correct(variates, upload(client, [client, 1]))
    assert list(variates.rows) == [0, 2]
    assert total(variates) == [2, 2, 0]


def test_without_room_nothing_is_kept_or_changed():
    for variates in (begun(limit=0), begun(limit=23)):  # a client takes 12 bytes
        uploads = [upload(0, [1, 2])]
        assert all(a is b for a, b in zip(variates.correct(uploads, lambda slot: START), uploads, strict=True))
        assert (variates.rows, variates.state(), variates.recalled()) == ({}, {}, 0)


def test_resume_goes_on_to_the_bit():
    one, other, generator = begun(), begun(), np.random.default_rng(1)
    rounds = [[upload(c, generator.normal(size=2), generator.normal()) for c in (n % 3, 3)] for n in range(8)]
    for uploads in rounds[:4]:
        correct(one, *uploads)
    other.restore(one.state())
    for uploads in rounds[4:]:
        assert correct(one, *uploads) == correct(other, *uploads)
    assert list(one.rows) == list(other.rows)
    assert one.heard == other.heard
    assert one.heard[3] == 15
