from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedcross.engines import network_grid
from fedcross.engines.grid import FIRST_NODE, LocalGrid, identify
from fedcross.engines.network_grid import NetworkGrid


class Remote(LocalGrid):
    """A grid of one device that answers when a test says so, with the nodes that a test names."""

    def __init__(self) -> None:
        super().__init__(lambda message, _: Message(RecordDict(), reply_to=message), 1, {})  # type: ignore[arg-type]
        self.nodes: list[Any] = [SimpleNamespace(node_id=FIRST_NODE, last_activated_at="2020-01-01T00:00:00+00:00")]
        self.ready: list[Message] = []
        self.faults: list[Exception] = []

    def get_nodes(self) -> list[Any]:
        return self.nodes

    def pull_messages(self, *_: Any, **__: Any) -> list[Message]:
        if self.faults:
            raise self.faults.pop()
        found, self.ready = self.ready, []
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(network_grid.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(network_grid.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def sent(grid: NetworkGrid) -> tuple[Message, str]:
    identify()
    message = Message(RecordDict({"config": ConfigRecord({"a": 1})}), FIRST_NODE, "train")
    [name] = grid.push_messages([message])
    assert message.content["config"]["a"] == 1  # the caller's message keeps its content
    return message, name


def codes(replies: list[Message]) -> list[int | None]:
    return [reply.error.code if reply.has_error() else None for reply in replies]


def test_a_reply_comes_once_and_ends_its_request(clock: list[float]) -> None:
    remote = Remote()
    grid = NetworkGrid(remote)
    message, name = sent(grid)
    remote.ready = [Message(RecordDict(), reply_to=message)]
    assert codes(grid.pull_messages([name])) == [None]
    remote.nodes = []
    clock[0] += 1000
    assert grid.pull_messages([name]) == []


def test_a_request_whose_slot_has_ended_is_followed_no_more(clock: list[float]) -> None:
    remote = Remote()
    grid = NetworkGrid(remote)
    kept, dropped = sent(grid)[1], sent(grid)[1]
    grid.forget([dropped])
    remote.nodes = []
    for _ in range(2):  # the first look notices that the device is away
        clock[0] += 1000
        replies = grid.pull_messages([kept, dropped])
    assert codes(replies) == [ErrorCode.NODE_UNAVAILABLE]


def test_a_device_that_has_restarted_has_lost_its_request(clock: list[float]) -> None:
    remote = Remote()
    grid = NetworkGrid(remote)
    _, name = sent(grid)
    clock[0] += network_grid.LOOK_S
    assert grid.pull_messages([name]) == []
    remote.nodes[0].last_activated_at = datetime.now(UTC).isoformat()
    clock[0] += network_grid.LOOK_S
    [reply] = grid.pull_messages([name])
    assert (reply.error.code, reply.metadata.reply_to_message_id) == (ErrorCode.MESSAGE_UNAVAILABLE, name)
    assert grid.pull_messages([name]) == []


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("back", "code"), [(True, ErrorCode.MESSAGE_UNAVAILABLE), (False, ErrorCode.NODE_UNAVAILABLE)])
def test_a_device_that_is_away_may_come_back(clock: list[float], told: bool, back: bool, code: int) -> None:
    remote = Remote()
    grid = NetworkGrid(remote)
    message, name = sent(grid)
    nodes, remote.nodes = remote.nodes, []
    if told:  # as Flower up to 1.42 does
        remote.ready = [Message(Error(ErrorCode.NODE_UNAVAILABLE, ""), reply_to=message)]
        remote.ready[0].metadata.__dict__["_reply_to_message_id"] = name
    clock[0] += network_grid.LOOK_S
    assert grid.pull_messages([name]) == []
    if back:
        nodes[0].last_activated_at = datetime.now(UTC).isoformat()
        remote.nodes = nodes
    clock[0] += network_grid.LOOK_S if back else network_grid.AWAY_S
    assert codes(grid.pull_messages([name])) == [code]


def test_a_device_has_half_a_minute_from_when_it_was_last_connected(clock: list[float]) -> None:
    remote = Remote()
    grid = NetworkGrid(remote)
    _, name = sent(grid)
    for nodes in (remote.nodes, remote.nodes, []):
        remote.nodes = nodes
        clock[0] += network_grid.LOOK_S if not nodes else network_grid.AWAY_S
        assert grid.pull_messages([name]) == []
    clock[0] += network_grid.AWAY_S
    assert codes(grid.pull_messages([name])) == [ErrorCode.NODE_UNAVAILABLE]


def test_a_busy_superlink_is_asked_again_and_a_refusal_is_not(clock: list[float]) -> None:
    request = httpx.Request("POST", "https://h")
    remote = Remote()
    grid = NetworkGrid(remote)
    remote.faults = [
        httpx.ReadError("cut", request=request),
        httpx.HTTPStatusError("", request=request, response=httpx.Response(500)),
    ]
    assert grid.pull_messages(["a"]) == []
    remote.faults = [httpx.HTTPStatusError("", request=request, response=httpx.Response(401))]
    with pytest.raises(httpx.HTTPStatusError):
        grid.pull_messages(["a"])
    remote.faults = [httpx.ReadError("cut", request=request)] * 1000
    with pytest.raises(httpx.ReadError):
        grid.pull_messages(["a"])


def test_a_request_whose_arrays_a_restarted_superlink_did_not_take_is_lost(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote()
    push = remote.push_messages

    class ObjectPushError(Exception):
        pass

    def cut(messages: list[Message]) -> list[str]:
        push(messages)  # gives the messages their ids
        raise ObjectPushError("object")

    monkeypatch.setattr(remote, "push_messages", cut)
    grid = NetworkGrid(remote)
    _, name = sent(grid)
    clock[0] += network_grid.LOOK_S
    [reply] = grid.pull_messages([name])
    assert (reply.error.code, reply.metadata.reply_to_message_id) == (ErrorCode.MESSAGE_UNAVAILABLE, name)


def test_only_flowers_grid_is_wrapped() -> None:
    local = Remote()
    assert network_grid.network_grid(local) is local
