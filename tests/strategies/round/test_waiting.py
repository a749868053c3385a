"""What the log says while a round waits for devices."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedcross.strategies.round import waiting
from fedcross.strategies.round.waiting import FAR_S, MOST, Notice
from tests.support.slots import drawn, federation
from tests.support.virtual import Clock, silent


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(waiting, "log", lambda _, text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize(("deadline", "when"), [(30.0, 15.0), (600.0, 60.0)])
def test_a_wait_is_told_once_after_a_minute_or_half_of_the_deadline(
    told: list[str], deadline: float, when: float
) -> None:
    notice = Notice(3, 100.0, 100.0 + deadline)
    notice.look(99.9 + when, lambda: {(1, 4)})
    assert told == []
    for later in (0.1, 1.0):
        notice.look(100.0 + when + later, lambda: {(2, 0), (1, 4)})
    [line] = told
    assert line.startswith("fedcross: round 3 waits for slot 1 (client 4), slot 2 (client 0), until ")
    assert re.search(r"until \d\d:\d\d:\d\d \S+ at the latest \(federation.deadline_s\)$", line)


def test_nothing_is_told_where_nobody_is_waited_for_or_the_time_is_over(told: list[str]) -> None:
    Notice(1, 0.0, 10.0).look(6.0, set)
    Notice(1, 0.0, 10.0).look(10.0, lambda: {(0, 0)})
    assert told == []


def test_a_long_list_is_cut(told: list[str]) -> None:
    Notice(1, 0.0, 10.0).look(6.0, lambda: {(slot, slot) for slot in range(MOST + 7)})
    assert "slot 9 (client 9) and 7 more, until" in told[0]


@pytest.mark.parametrize(("seconds", "named"), [(FAR_S, True), (2 * FAR_S, False), (1e12, False), (1e300, False)])
def test_a_deadline_that_is_years_away_is_not_named(told: list[str], seconds: float, named: bool) -> None:
    Notice(1, 0.0, 61.0 + seconds).look(61.0, lambda: {(0, 3)})
    [line] = told
    assert ("until" in line) is named
    if not named:
        assert line == "fedcross: round 1 waits for slot 0 (client 3)"


def test_a_round_that_waits_for_a_silent_client_names_it(told: list[str], monkeypatch: Any) -> None:
    method, grid = federation(Clock(monkeypatch), {}, deadline_s=30)
    grid.scripts = {drawn(method)[0]: silent}
    method.run_round(1, grid)
    [line] = told
    assert f"round 1 waits for slot 0 (client {drawn(method)[0]}), until" in line
    grid.scripts = {}
    method.run_round(2, grid)
    assert len(told) == 1
