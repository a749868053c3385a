"""What a refused reply leaves behind: an error for the server, at the device's own request and at no other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from fedcross.core import allowance
from fedcross.core.allowance import Refusal
from fedcross.engines.executor import instead, replies
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.wire.records import encode
from tests.support.link_state import Run, opened
from tests.support.trees import tree
from tests.support.virtual import trained

NAN = math.nan


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened(None if request.param == "memory" else tmp_path_factory.mktemp("state") / "state.db")


@pytest.fixture
def run(state: Any) -> Iterator[Run]:
    found = Run(state)
    yield found
    found.finish()


def content(size: int = 10) -> RecordDict:
    scalars = ConfigRecord({"a": 1})
    return RecordDict({"arrays": encode({"w": np.arange(size, dtype=np.float32)}), "config": scalars})


def got(run: Run, request: Message) -> Message | None:
    """Return what the server gets for `request`."""
    found = list(run.grid().pull_messages([request.metadata.message_id]))
    return found[0] if found else None


def uploads(run: Run) -> int:
    """Return how many uploads the SuperLink waits for."""
    if hasattr(run.state, "message_ins_store"):
        return len(run.state._object_push_sessions)
    with run.state.session() as session:
        return int(session.scalar(text("SELECT count(*) FROM object_push_sessions")))


def refused(run: Run, reply: Message, node: int, **told: Any) -> str:
    """Announce what must be refused; return why."""
    with pytest.raises(HTTPException) as refusal:
        run.announce(reply, node, **told)
    assert refusal.value.status_code in (400, 413)
    return str(refusal.value.detail)


def test_the_code_is_that_of_a_refusal() -> None:
    assert instead.REFUSED == allowance.REFUSED


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"created_at": NAN}, "made at nan"),
        ({"created_at": 1.0}, "before its request"),
        ({"ttl": NAN}, "lives for nan"),
        ({"ttl": 9999.0}, "times do not fit"),  # Flower itself does not store it, and says so to nobody
        ({"message_type": "evil\n"}, "no type of message"),
        ({"run_id": 77}, "says run 77"),
        ({"src_node_id": 1}, "node 1 sent it"),
        ({"dst_node_id": 5}, "for node 5"),
    ],
)
def test_the_server_gets_an_error_with_the_reason_at_once(run: Run, told: dict[str, Any], why: str) -> None:
    node = run.nodes[0]
    request = run.request(node)
    assert why in refused(run, run.reply(request, content()), node, **told)
    found = got(run, request)
    assert found is not None
    assert isinstance(found.error, Refusal)
    assert found.error.kind == "refused"
    assert why in str(found.error.reason)
    assert (found.metadata.reply_to_message_id, found.metadata.src_node_id) == (request.metadata.message_id, node)


def test_a_reply_with_too_many_objects_is_told(run: Run) -> None:
    node = run.nodes[0]
    request = run.request(node)
    many = RecordDict({f"r{i}": ConfigRecord({"i": i}) for i in range(100)})
    assert "more than 100 objects" in refused(run, run.reply(request, many), node)
    found = got(run, request)
    assert found is not None
    assert "more than 100 objects" in str(found.error.reason)


def test_a_tree_that_flower_cannot_store_is_told(run: Run) -> None:
    """An object's name is none; or it is announced with other children than the store has of it."""
    node = run.nodes[0]
    honest = run.reply(run.request(node), content())
    assert run.announce(honest, node, tree("message", tree("table", tree("record"))))
    for made in (ObjectTree(object_id="no name"), tree("message 2", tree("table"))):
        request = run.request(node)
        why = refused(run, run.reply(request, content()), node, made=made)
        found = got(run, request)
        assert found is not None
        assert str(found.error.reason).partition(": ")[2] in why


def test_nobody_ends_the_request_of_another(run: Run) -> None:
    """Neither with the other's name as the sender, nor with his own; nor one that is not there."""
    victim, stranger = run.nodes
    request = run.request(victim)
    assert "request to node" in refused(run, run.reply(request, content(), stranger), stranger)
    assert f"node {victim} sent it" in refused(run, run.reply(request, content(), victim), stranger)
    assert not instead.report(run.state, request.metadata.message_id, stranger, "why")
    assert not instead.replace(run.state, request.metadata.message_id, stranger, "why")
    assert not instead.report(run.state, "none", stranger, "why")
    assert not instead.report(run.state, "", stranger, "why")
    assert got(run, request) is None
    assert run.send(run.reply(request, content()), victim)
    found = got(run, request)
    assert found is not None


def test_a_stranger_cannot_replace_a_reply_that_is_on_its_way(run: Run) -> None:
    victim, stranger = run.nodes
    reply = run.reply(run.request(victim), content())
    run.announce(reply, victim)
    assert not instead.replace(run.state, reply.object_id, stranger, "why")
    assert instead.reply_to(run.state, reply.metadata.reply_to_message_id) == reply.object_id
    assert reply.object_id in run.state.object_store


def test_a_right_reply_after_a_refused_one_counts_for_the_next_request_only(run: Run) -> None:
    """Flower takes one reply to a request; what the device sends to the same one is taken off its hands, not stored."""
    node, before = run.nodes[0], uploads(run)
    first = run.request(node)
    refused(run, run.reply(first, content()), node, created_at=NAN)
    assert run.send(run.reply(first, content()), node) == 0
    found = got(run, first)
    assert found is not None
    assert isinstance(found.error, Refusal)
    assert run.send(run.reply(first, content()), node) == 0  # nor after the server has seen it
    again = run.request(node)
    assert run.send(run.reply(again, content()), node)
    assert got(run, again) is not None
    assert uploads(run) == before  # a reply that is not stored leaves no row of an upload


def test_a_reply_that_is_there_stays_when_a_later_one_is_refused(run: Run) -> None:
    node = run.nodes[0]
    request = run.request(node)
    right = run.reply(request, content())
    run.send(right, node)
    refused(run, run.reply(request, content(20)), node, ttl=NAN)
    assert instead.reply_to(run.state, request.metadata.message_id) == right.object_id


def test_what_is_sent_twice_over_a_broken_connection_is_no_fault(run: Run) -> None:
    node = run.nodes[0]
    reply = run.reply(run.request(node), content())
    assert run.send(reply, node)
    assert run.send(reply, node) == 0


@pytest.mark.parametrize("seen", [False, True], ids=["before the server looks", "while it waits for the objects"])
def test_a_reply_over_the_quota_is_told_and_deleted(state: Any, seen: bool) -> None:
    run = Run(state, quota=20_000)
    node = run.nodes[0]
    request = run.request(node)
    grid = run.grid()
    reply = run.reply(request, content(10_000))  # 40 kB
    objects = {one.object_id: one for one in run.parts(reply)}
    answer = run.announce(reply, node)
    if seen:
        assert list(grid.pull_messages([request.metadata.message_id])) == []
        grid._arrived[0].next = 0.0
    large = max(objects, key=lambda one: len(objects[one].deflate()))
    with pytest.raises(HTTPException) as refusal:
        run.put(node, answer.session_id, large, objects[large].deflate())
    assert refusal.value.status_code == 413
    others = [one for one in answer.objects_to_push if one != large]
    assert not any(run.put(node, answer.session_id, one, objects[one].deflate()) for one in others)
    [told] = grid.pull_messages([request.metadata.message_id])
    assert isinstance(told.error, Refusal) != seen
    assert ("more than the SuperLink takes" if seen else "FEDCROSS_REPLY_MIB") in str(told.error.reason)
    assert reply.object_id not in state.object_store
    run.finish()


def test_a_busy_database_is_asked_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gets status 503, sends the reply again, and then the server is told."""
    node = run.nodes[0]
    request = run.request(node)
    busy = [OperationalError("insert", {}, Exception("database is locked"))]
    report = instead.report

    def once(*arguments: Any) -> bool:
        if busy:
            raise busy.pop()
        return report(*arguments)

    monkeypatch.setattr(instead, "report", once)
    reply = run.reply(request, content())
    with pytest.raises(replies.Later):
        run.announce(reply, node, ttl=NAN)
    refused(run, reply, node, ttl=NAN)
    assert got(run, request) is not None


def test_a_request_that_has_expired_gets_nothing(run: Run) -> None:
    request = run.request(run.nodes[0])
    expired = request.metadata.created_at + request.metadata.ttl + 1
    assert not instead.report(run.state, request.metadata.message_id, run.nodes[0], "why", expired)


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False], ids=["refused once", "refused twice"])
def test_a_round_goes_on_and_the_device_gets_a_second_request(state: Any, late: bool) -> None:
    """Real rounds: the first reply of one device is refused, the right one that it sends then comes too late."""
    run = Run(state, nodes=3)
    asked: list[Message] = []

    def act(message: Message) -> None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "query":
            who = RecordDict({"config": ConfigRecord({"partition-id": run.nodes.index(node)})})
            run.send(run.reply(message, who, message_type="query"), node)
            return
        right = run.reply(message, trained(message).content)
        if node == run.nodes[1]:
            asked.append(message)
            if not late or len(asked) == 1:
                refused(run, right, node, created_at=NAN)
                assert run.send(right, node) == 0
                return
        assert run.send(right, node)

    run.device = act
    method = FedAvg(clients_per_round=3, nonce=True, deadline_s=3600, run="r", networked=True, packed=False)
    method.begin({"w": np.zeros(3, np.float32)})
    report = method.run_round(1, run.grid())
    assert len(asked) == 2
    assert (report.dropped, dict(report.rejected)) == ((0, {"refused": 1}) if late else (1, {"refused": 2}))
    assert (method.evaluation_arrays()["w"] == 1).all()
    run.finish()
