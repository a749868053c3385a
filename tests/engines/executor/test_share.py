"""How often a node may call; the log names it once a minute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node

from fedcross.engines.executor import share as module
from fedcross.engines.executor.node import LEAST_S
from fedcross.engines.executor.replies import Later
from fedcross.engines.executor.share import BURST, MOST, Share, within


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def calls(share: Share, count: int, node: int = 1) -> int:
    """Return how many of `count` calls at once pass."""
    passed = 0
    for _ in range(count):
        try:
            share.take(node)
        except Later:
            continue
        else:
            passed += 1
    return passed


def test_twice_what_an_honest_node_calls_passes_and_no_more() -> None:
    clock = Clock()
    share = Share(clock=clock)
    assert MOST >= 2 * (60 / LEAST_S + 3 * 60)  # asks every .2 s, three calls for a message each second
    assert calls(share, MOST) == BURST
    with pytest.raises(Later) as later:
        share.take(1)
    assert later.value.status_code == 503  # a SuperNode repeats it
    assert "Retry-After" in (later.value.headers or {})
    clock.now = 6.0
    assert calls(share, MOST) == MOST / 10
    clock.now = 600.0
    assert calls(share, MOST) == BURST
    assert calls(share, 5, node=2) == 5  # others have shares of their own


def test_the_log_names_a_node_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    share = Share(10, 10, clock=clock)
    calls(share, 1000, node=4711)
    assert caplog.text.count("node 4711 makes more than 10 calls a minute") == 1
    clock.now = 61.0
    calls(share, 20, node=4711)
    lines = [one.getMessage() for one in caplog.records if "4711" in one.getMessage()]
    assert len(lines) == 2
    assert "990 refused" in lines[1]


def test_nodes_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 5)
    clock = Clock()
    share = Share(clock=clock)
    for node in range(5):
        share.take(node)
    clock.now = 100.0
    share.take(9)
    assert list(share._calls) == [9]


def test_a_call_counts_for_the_node_that_makes_it() -> None:
    state = SimpleNamespace(get_node_id_by_public_key={b"k": 3}.get)
    share, seen = Share(1, 1, clock=Clock()), []

    def handler(request: Any, state: Any, store: str = "") -> str:
        seen.append((request, store))
        return "answer"

    call = within(handler, share, Share(2, 2, clock=Clock()))
    assert call(request=PullMessagesRequest(node=Node(node_id=1)), state=state, store="s") == "answer"
    assert seen[0][1] == "s"
    assert call(request=DeactivateNodeRequest(node_id=2), state=state) == "answer"
    assert call(request=ActivateNodeRequest(public_key=b"k"), state=state) == "answer"
    for stranger in (b"a", b"b"):
        assert call(request=ActivateNodeRequest(public_key=stranger), state=state) == "answer"  # Flower refuses it
    assert len(seen) == 5
    for request in (
        PullMessagesRequest(node=Node(node_id=1)),
        DeactivateNodeRequest(node_id=2),
        ActivateNodeRequest(public_key=b"k"),
        ActivateNodeRequest(public_key=b"c"),  # all strangers have one share
    ):
        with pytest.raises(Later):
            call(request=request, state=state)
    assert len(seen) == 5
