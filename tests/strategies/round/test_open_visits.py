"""A client that is ahead of the others' median waits."""

import pytest

from fedcross.strategies.round import open_visits
from fedcross.strategies.round.open_visits import SOUND, Lead


@pytest.fixture
def lines(monkeypatch):
    """Return the list of lines that are logged."""
    found = []
    monkeypatch.setattr(open_visits, "log", lambda level, text, *values: found.append(text % values))
    return found


def lead_of(most=3.0, lost=(), **made):
    """Return the lead after so many visits of client i (``c7=2``); the last visit of those in `lost` was lost."""
    counted = Lead(most)
    for name, count in made.items():
        for _ in range(count):
            counted.ended(int(name[1:]), accepted=int(name[1:]) not in lost)
    return counted


def test_a_client_waits_from_three_times_the_median_and_three_more(lines):
    """The lower median of 1, 2, 14, 15 visits is 2: the limit is 15."""
    counted = lead_of(c0=15, c1=14, c2=1, c3=2)
    assert counted.behind([0, 1], range(4)) == [1]
    assert counted.behind([0], range(4)) == []
    assert lead_of(None, c0=15, c1=14, c2=1, c3=2).behind([0, 1], range(4)) == [0, 1]
    assert lines


def test_a_client_whose_visits_are_lost_is_no_measure(lines):
    counted = lead_of(c0=40, c1=1, lost=(1,))
    for _ in range(SOUND - 1):
        counted.ended(1, accepted=True)
        assert counted.behind([0], range(2)) == [0]
    counted.ended(1, accepted=True)
    assert counted.behind([0], range(2)) == []  # made 6: the limit is 27


def test_a_client_that_joins_late_counts_as_the_median(lines):
    counted = lead_of(c0=20, c1=20)
    counted.made[2] = counted.made[3] = counted.usual([0, 1])
    assert counted.behind([0, 1], range(4)) == [0, 1]
