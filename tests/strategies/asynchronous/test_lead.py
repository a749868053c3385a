"""Who is ahead of the others' median, and what is said of it."""

import pytest

from fedcross.strategies.asynchronous import lead
from fedcross.strategies.asynchronous.lead import SOUND, Lead


def lead_of(most=3.0, lost=(), **made):
    """Return the lead after so many visits of client i (``c7=2``); the last visit of those in `lost` was lost."""
    counted = Lead(most)
    for name, count in made.items():
        for _ in range(count):
            counted.ended(int(name[1:]), int(name[1:]) not in lost)
    return counted


@pytest.fixture
def lines(monkeypatch):
    """Return the list of lines that are logged, with the level before them."""
    found = []
    monkeypatch.setattr(lead, "log", lambda level, text, *values: found.append((level, text % values)))
    return found


def test_ahead_is_who_has_three_times_the_median_and_three_more(lines):
    """The lower median of 1, 2, 14, 15 visits is 2: the limit is 15."""
    counted = lead_of(c0=15, c1=14, c2=1, c3=2)
    assert counted.behind([0, 1], range(4)) == [1]
    assert counted.behind([0], range(4)) == []
    assert lead_of(None, c0=15, c1=14, c2=1, c3=2).behind([0, 1], range(4)) == [0, 1]
    [(_, said)] = lines
    assert "client 0 waits for others: it has made 15 visits" in said
    assert "federation.lead=3" in said


def test_who_has_not_been_asked_or_has_left_does_not_count(lines):
    """Clients 1 to 9 have made nothing: of those asked the median is 9."""
    counted = lead_of(c0=9)
    assert counted.behind([0, 1], [0]) == [0, 1]
    assert counted.behind([0, 1], [0, 1, 2]) == [1]


def test_lost_visits_count_and_whose_last_visit_was_lost_is_nobodys_measure(lines):
    counted = lead_of(c0=9, c1=1, c2=1, lost=(0, 1, 2))
    assert counted.lost == {0: 9, 1: 1, 2: 1}
    assert counted.behind([0], range(3)) == [0]  # nobody answers
    counted.ended(1, accepted=True)
    for _ in range(SOUND - 1):
        counted.ended(1, accepted=True)  # made 6: the limit is 27
    for _ in range(18):
        assert counted.behind([0], range(3)) == [0]
        counted.ended(0, accepted=False)
    assert counted.behind([0], range(3)) == []


def test_who_answers_now_and_then_is_nobodys_measure(lines):
    """Client 1 has far fewer visits than client 0, and would hold it up at each of its deadlines."""
    counted = lead_of(c0=40, c1=1, lost=(1,))
    for _ in range(SOUND - 1):
        counted.ended(1, accepted=True)
        assert counted.behind([0], range(2)) == [0]
    counted.ended(1, accepted=True)
    assert counted.behind([0], range(2)) == []  # made 6: the limit is 27
    counted.ended(1, accepted=False)
    assert counted.behind([0], range(2)) == [0]


def test_who_joins_late_counts_as_the_median_from_then_on(lines):
    """Else those that are there would wait until half of all have caught up."""
    counted = lead_of(c0=20, c1=20)
    for client in (2, 3):
        counted.enter(client, [0, 1])
    assert counted.begun == {2: 20, 3: 20}
    assert counted.behind([0, 1], range(4)) == [0, 1]
    for _ in range(49):  # the limit is 69, and those before count
        assert counted.behind([3], range(4)) == [3]
        counted.ended(3, accepted=True)
    assert counted.behind([3], range(4)) == []


def test_it_is_said_once_that_one_client_makes_most_of_the_visits(lines):
    counted = Lead(None)
    for number, clients in enumerate(([0, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 2], [0, 0, 1], [0, 0, 0]), start=1):
        for client in clients:
            counted.ended(client, accepted=True)
        counted.end_round(number, connected=3)
        assert len(lines) == (number >= 5)  # client 0 in rounds 3, 4 and 5
    assert "client 0 made more than half of the visits of each of the last 3 rounds (2 of 3 in round 5)" in lines[0][1]


@pytest.mark.parametrize(("visits", "connected"), [(1, 5), (3, 1)])
def test_a_lone_visit_or_a_lone_client_is_nothing_to_speak_of(lines, visits, connected):
    counted = Lead(None)
    for number in range(1, 9):
        for _ in range(visits):
            counted.ended(0, accepted=True)
        counted.end_round(number, connected)
    assert not lines


def test_half_is_not_most(lines):
    counted = Lead(None)
    for number in range(1, 9):
        for client in (0, 1):
            counted.ended(client, accepted=True)
        counted.end_round(number, connected=2)
    assert not lines


def test_a_checkpoint_keeps_the_counts():
    counted = lead_of(c0=3, c4=2, lost=(4,))
    counted.enter(7, [0])
    again = Lead(3.0)
    again.restore(counted.plain())
    assert again.plain() == counted.plain()
    assert counted.plain() == {"made": {"0": 3, "4": 2}, "lost": {"4": 2}, "failed": {"4": SOUND}, "begun": {"7": 3}}
