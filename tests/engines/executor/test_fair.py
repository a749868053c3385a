"""The node that has had least of the SuperLink's time is answered next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node

from fedcross.engines.executor import fair as module
from fedcross.engines.executor.fair import HALF_S, MOST, Fair, in_place
from fedcross.engines.executor.replies import Later, Refusals
from fedcross.engines.executor.turns import LARGE

GREEDY, MODEST, NEW = 1, 2, 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def have(fair: Fair, clock: Clock, node: int, seconds: float) -> None:
    with fair.place(node):
        clock.now += seconds


def waiting(fair: Fair, count: int) -> None:
    """Return once `count` calls wait."""
    while len(fair._queue) < count:
        threading.Event().wait(0.001)


def order(fair: Fair, nodes: list[int]) -> list[int]:
    """Return the order in which calls of `nodes`, which come while the only place is taken, are answered."""
    answered: list[int] = []

    def call(node: int) -> None:
        with fair.place(node):
            answered.append(node)

    with ThreadPoolExecutor(len(nodes)) as pool:
        with fair.place(99):
            calls = []
            for count, node in enumerate(nodes, start=1):
                calls.append(pool.submit(call, node))
                waiting(fair, count)
        for one in calls:
            one.result(60)
    return answered


def test_who_has_had_least_is_next_and_the_older_call_of_two() -> None:
    clock = Clock()
    fair = Fair(Refusals(), places=1, clock=clock)
    have(fair, clock, GREEDY, 4.0)
    have(fair, clock, MODEST, 1.0)
    assert order(fair, [GREEDY, GREEDY, MODEST, NEW, NEW, MODEST]) == [NEW, NEW, MODEST, MODEST, GREEDY, GREEDY]


def test_what_a_node_has_had_fades() -> None:
    clock = Clock()
    fair = Fair(Refusals(), places=1, clock=clock)
    have(fair, clock, GREEDY, 4.0)
    clock.now += 3 * HALF_S  # 4 s count as .5 s
    have(fair, clock, MODEST, 1.0)
    assert order(fair, [MODEST, GREEDY]) == [GREEDY, MODEST]


def test_a_place_is_free_again_after_an_error() -> None:
    fair = Fair(Refusals(), places=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="of the handler"), fair.place(GREEDY):
            raise ValueError("of the handler")
    assert order(fair, [MODEST]) == [MODEST]
    assert not fair._uses[GREEDY].here


def test_a_node_has_so_many_calls_here_and_others_pass(caplog: pytest.LogCaptureFixture) -> None:
    fair, go = Fair(Refusals()), threading.Event()

    def call() -> str:
        try:
            with fair.place(GREEDY, large=True):
                go.wait(60)
        except Later as later:
            return str(later.status_code)
        return "answered"

    with ThreadPoolExecutor(MOST + 4) as pool:
        calls = [pool.submit(call) for _ in range(MOST + 4)]
        while sum(one.done() for one in calls) < 4:
            go.wait(0.001)
        with fair.place(MODEST):
            pass
        go.set()
        answers = [one.result(60) for one in calls]
    assert (answers.count("503"), answers.count("answered")) == (4, MOST)  # a SuperNode asks again
    assert f"refused a call of node {GREEDY}: {MOST} of its calls are here already" in caplog.text


def test_who_waits_too_long_is_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_S", 0.01)
    fair = Fair(Refusals(), places=1)
    with fair.place(GREEDY), pytest.raises(Later), fair.place(MODEST):
        pass
    assert order(fair, [MODEST]) == [MODEST]  # the place was not lost with it


def test_nodes_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    clock = Clock()
    fair = Fair(Refusals(), clock=clock)
    with fair.place(0):  # is here, so it stays
        for node in range(1, 11):
            have(fair, clock, node, 1.0)
        assert sorted(fair._uses) == [0, *range(2, 11)]


def test_a_call_counts_for_the_node_that_makes_it() -> None:
    places: list[tuple[int, bool]] = []
    fair = Fair(Refusals())
    take: Callable[..., Any] = fair.place

    def place(node: int, large: bool = False) -> Any:
        places.append((node, large))
        return take(node, large)

    fair.place = place  # type: ignore[method-assign]
    handler = in_place(lambda request, state, store="": f"answer {store}", fair)
    state = SimpleNamespace(get_node_id_by_public_key={}.get)
    small = PushObjectRequest(node=Node(node_id=1), object_content=b"x" * (LARGE - 1))
    large = PushObjectRequest(node=Node(node_id=2), object_content=b"x" * LARGE)
    assert [handler(request=one, state=state, store="s") for one in (small, large)] == ["answer s"] * 2
    assert handler(request=SimpleNamespace(public_key=b"stranger"), state=state) == "answer "  # Flower refuses it
    assert places == [(1, False), (2, True), (0, False)]
