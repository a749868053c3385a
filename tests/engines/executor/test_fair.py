"""Who has had least of the SuperLink's time is next, and nobody gets more than its part while others work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from fedcross.engines.executor import fair as module
from fedcross.engines.executor.fair import (
    ACTIVE_S,
    BURST_S,
    FEW,
    HALF_S,
    LARGE_PLACES,
    MOST,
    MOST_STRANGERS,
    PATIENT_S,
    PLACES,
    STRANGERS,
    TOGETHER,
    TOLD_S,
    Call,
    Caller,
    Fair,
)
from fedcross.engines.executor.replies import Later

GREEDY, MODEST, NEW = 1, 2, 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timer:
    """The last alarm that was set, and whether it was called off."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.off = seconds, call, False

    def cancel(self) -> None:
        self.off = True


def new(fair: Fair, caller: Caller, large: bool = False) -> Call:
    call = fair.come(caller, "path")
    call.large = large
    fair.wait(call)
    return call


def have(fair: Fair, clock: Clock, node: int, seconds: float) -> None:
    """Let a node have been answered for so long."""
    fair.charge(fair.node(node), seconds)
    fair.node(node).called = clock.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fair(clock: Clock) -> Fair:
    """A SuperLink where nodes 98 and 99 work."""
    made = Fair(clock)
    for node in (98, 99):
        have(made, clock, node, 0.5)
    return made


def test_who_has_had_least_is_next_and_the_older_call_of_two(fair: Fair, clock: Clock) -> None:
    have(fair, clock, GREEDY, 0.4)
    have(fair, clock, MODEST, 0.1)
    first = [new(fair, fair.node(50 + number)) for number in range(PLACES)]
    nodes = [GREEDY, GREEDY, MODEST, NEW, NEW, MODEST]
    waiting = [new(fair, fair.node(node)) for node in nodes]
    order: list[Call] = []
    for number, call in enumerate(waiting):
        assert call.began is None
        call.admitted = lambda call=waiting[number]: order.append(call)  # type: ignore[misc]
    for call in first:
        fair.go(call)
    assert order == [waiting[number] for number in (3, 4, 2, 5)]
    for call in order[:2]:
        fair.go(call)
    assert order[4:] == waiting[:2]


def test_a_caller_gets_its_part_back(fair: Fair, clock: Clock) -> None:
    caller = fair.node(GREEDY)
    have(fair, clock, GREEDY, 5.0)
    assert caller.balance == BURST_S - 5.0
    assert fair.part(caller, clock.now) == pytest.approx(TOGETHER - 1.0 * 0.6931 / HALF_S, abs=1e-3)
    for node in range(10, 20):
        have(fair, clock, node, 1.0)
    clock.now = 1.0
    part = fair.part(caller, clock.now)
    assert part == pytest.approx(1 / 13)  # 12 others have called lately, and take more than half of the time
    fair.come(caller, "path")
    assert caller.balance == pytest.approx(BURST_S - 5.0 + part)
    clock.now = 200.0  # all are silent
    assert fair.part(caller, clock.now) == 1.0


def test_one_that_has_trained_alone_gets_a_part_from_a_count_of_nobody(fair: Fair, clock: Clock) -> None:
    """All train for longer than a node counts as active; then one makes two calls within a second."""
    caller = fair.node(GREEDY)
    have(fair, clock, GREEDY, 3.0)
    for node in range(10, 14):
        have(fair, clock, node, 3.0)
    clock.now = ACTIVE_S + 1
    fair.come(caller, "path")
    clock.now += 0.1
    assert fair.part(caller, clock.now) == 1.0
    fair.come(caller, "path")


def test_who_has_used_half_has_one_call_inside_and_few_here(fair: Fair, clock: Clock) -> None:
    caller = fair.node(GREEDY)
    have(fair, clock, GREEDY, BURST_S * 0.4)
    calls = [new(fair, caller) for _ in range(MOST)]
    assert caller.inside == PLACES
    with pytest.raises(Later):
        fair.come(caller, "path")
    have(fair, clock, GREEDY, BURST_S * 0.2)
    for call in calls:
        fair.go(call)
    assert not caller.here
    calls = [new(fair, caller) for _ in range(FEW)]
    assert caller.inside == 1
    with pytest.raises(Later) as later:
        fair.come(caller, "path")
    assert later.value.status_code == 503  # a SuperNode asks again
    other = new(fair, fair.node(MODEST))
    assert other.began is not None
    fair.go(calls[0])
    assert not caller.inside  # it waits for others
    clock.now += PATIENT_S
    fair.admit()
    assert calls[1].began is not None
    fair.go(calls[1])
    fair.go(other)
    assert calls[2].began is not None
    assert calls[3].began is None


def test_who_has_used_all_waits_until_there_is_something_again(fair: Fair, clock: Clock) -> None:
    alarms: list[Timer] = []

    def later(seconds: float, call: Callable[[], None]) -> Timer:
        alarms.append(Timer(seconds, call))
        return alarms[-1]

    fair.later = later
    have(fair, clock, GREEDY, BURST_S + 0.2)
    first, second = new(fair, fair.node(GREEDY)), new(fair, fair.node(GREEDY))
    assert first.began is second.began is None
    seconds = alarms[-1].seconds
    assert seconds == pytest.approx(0.2 / fair.part(fair.node(GREEDY), 0.0), rel=0.1)
    other = new(fair, fair.node(MODEST))
    assert other.began is not None
    clock.now = 1.1 * seconds  # its part has become a little smaller meanwhile
    fair.go(other)
    assert first.began is not None
    assert second.began is None
    assert alarms[0].off
    fair.go(second)  # it gives up
    fair.go(first)
    assert not fair._queue


def test_a_flood_has_next_to_nothing_answered_until_it_stops(fair: Fair, clock: Clock) -> None:
    caller, here, answered = fair.node(GREEDY), list[Call](), [0, 0]
    for step in range(6000):
        clock.now += 0.01
        for node in (98, 99):
            have(fair, clock, node, 0.002)
        flood = step < 4500
        for _ in range(2 if flood else step % 50 == 0):  # 200 calls a second, then two
            with contextlib.suppress(Later):
                here.append(fair.come(caller, "path"))
                fair.wait(here[-1])
        fair.admit()
        for call in [one for one in here if one.began is not None]:
            fair.charge(caller, 0.01)
            fair.go(call)
            here.remove(call)
            answered[flood] += step >= 1000
    assert answered[1] < 10  # of 7,000
    assert answered[0] > 10  # of 30; its debt is at most BURST_S
    assert caller.balance >= -BURST_S


def test_four_calls_at_a_time_pay_a_quarter_each(fair: Fair, clock: Clock) -> None:
    calls = [new(fair, fair.node(number)) for number in range(PLACES)]
    clock.now = 1.0
    fair.go(calls[0])
    assert fair.node(0).balance == pytest.approx(BURST_S - 0.25)
    clock.now = 1.3
    fair.go(calls[1])
    assert fair.node(1).balance == pytest.approx(BURST_S - 0.25 - 0.1)


def test_a_large_object_pays_for_its_work_and_not_for_its_turn(fair: Fair, clock: Clock) -> None:
    calls = [new(fair, fair.node(number), large=True) for number in range(LARGE_PLACES + 1)]
    assert calls[-1].began is None
    small = new(fair, fair.node(50))
    assert small.began is not None
    clock.now, calls[0].waited = 3.0, 2.8
    fair.go(calls[0])
    assert fair.node(0).balance == pytest.approx(BURST_S - 0.1)  # a small call was inside too
    assert calls[-1].began is not None


def test_strangers_come_after_nodes_and_have_few_places(clock: Clock) -> None:
    fair = Fair(clock)
    strangers = [new(fair, fair.strangers(f"10.0.0.{number}")) for number in range(5)]
    assert [call.began is not None for call in strangers] == [number < STRANGERS for number in range(5)]
    nodes = [new(fair, fair.node(number)) for number in range(PLACES)]
    fair.go(strangers[0])
    assert nodes[2].began is not None
    assert strangers[2].began is None
    fair.go(nodes[0])
    assert nodes[3].began is not None
    fair.go(nodes[1])
    assert strangers[2].began is not None
    one = fair.strangers("10.0.1.1")
    for _ in range(MOST_STRANGERS):
        fair.come(one, "path")
    with pytest.raises(Later):
        fair.come(one, "path")


def test_all_strangers_together_have_a_bound(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_STRANGERS", 10)
    fair = Fair(clock)
    calls = [fair.come(fair.strangers(str(number)), "path") for number in range(10)]
    with pytest.raises(Later):
        fair.come(fair.strangers("new"), "path")
    fair.come(fair.node(1), "path")
    fair.go(calls[0])
    fair.come(fair.strangers("new"), "path")


def test_a_call_can_turn_out_to_be_anothers(clock: Clock) -> None:
    fair = Fair(clock)
    call = new(fair, fair.strangers("a"))
    fair.move(call, fair.node(NEW))
    clock.now = 1.0
    fair.go(call)
    assert fair.node(NEW).balance == BURST_S - 1
    assert fair.strangers("a").balance == BURST_S
    assert not any((fair._strangers, fair._strangers_here, fair._inside, fair.node(NEW).here, fair.strangers("a").here))


def test_the_log_names_who_is_sent_away_once_a_minute(
    fair: Fair, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caller = fair.node(4711)
    caller.away["path"] = 1e9
    for _ in range(500):
        with pytest.raises(Later, match="has used up its share"):
            fair.come(caller, "path")
    fair.come(caller, "other")
    clock.now = TOLD_S
    with pytest.raises(Later):
        fair.come(caller, "path")
    told = [one.getMessage() for one in caplog.records if "node 4711" in one.getMessage()]
    assert len(told) == 2
    assert told[1].endswith("(500 since the last line on it)")


def test_callers_that_are_gone_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    fair = Fair(clock)
    fair.come(fair.node(0), "path")  # is here, so it stays
    for number in range(1, 100):
        clock.now += 1
        fair.node(number)
        fair.strangers(str(number))
    assert 0 in fair._nodes
    assert 99 in fair._nodes
    assert len(fair._nodes) == len(fair._addresses) == 10
