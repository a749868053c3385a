"""Messages that are no replies, times that are none and too slow heartbeats; nothing of them reaches Flower."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.servicer.fleet import fleet_handlers
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session

from fedcross.engines.executor.announced import limited
from fedcross.engines.executor.instead import REFUSED, asked_for
from fedcross.engines.executor.ledger import Ledger
from fedcross.engines.executor.replies import HEARTBEAT_S, Refusals, plain, steady, wrong
from fedcross.engines.guarded import MOST
from tests.support.fleet_door import NODE, Link, pushed
from tests.support.trees import deep

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"reply_to_message_id": ""}, "a request and not a reply"),
        ({"reply_to_message_id": "", "src_node_id": 1, "dst_node_id": 2}, "a request and not a reply"),
        ({"src_node_id": 2, "reply_to_message_id": "to 2"}, "node 2 sent it"),
        ({"src_node_id": 1}, "node 1 sent it"),
        ({"dst_node_id": 2}, "for node 2"),
        ({"dst_node_id": NODE}, "for node 4711"),
        ({"reply_to_message_id": "to 2"}, "answers a request to node 2"),
        ({"run_id": 77}, "says run 77"),
        ({"run_id": 77, "reply_to_message_id": "none"}, "no run 77"),
        ({"message_type": "evil\n\x1b[2J"}, "no type of message: 'evil\\n\\x1b[2J'"),
        ({"message_type": ""}, "no type of message"),
        ({"created_at": NAN}, "made at nan"),
        ({"created_at": INF}, "made at inf"),
        ({"created_at": -INF}, "made at -inf"),
        ({"created_at": 4e12}, "made at 4000000000000"),
        ({"created_at": 1.0}, "before its request"),
        ({"ttl": NAN}, "lives for nan s"),
        ({"ttl": INF}, "lives for inf s"),
        ({"ttl": 1e300}, "lives for 1e+300 s"),
        ({"reply_to_message_id": "to\n\x1b[2J"}, "the name of its request, or of its group, is none"),
        ({"reply_to_message_id": "Q" * 240_000}, "the name of its request, or of its group, is none"),
        ({"group_id": "\u202e"}, "the name of its request, or of its group, is none"),
        ({"runtime": NAN}, "took nan s"),
        ({"runtime": INF}, "took inf s"),
        ({"runtime": -1e300}, "took -1e+300 s"),
    ],
)
def test_what_is_no_reply_of_the_caller_is_refused_and_named(
    told: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link()
    with pytest.raises(HTTPException) as refusal:
        limited(link.push, MOST, Ledger(MOST, 1 << 30), Refusals())(request=pushed(deep(3), **told), state=link)
    assert refusal.value.status_code == 400
    assert why in refusal.value.detail
    assert not link.pushes
    [line] = [one.getMessage() for one in caplog.records if "refused" in one.getMessage()]
    assert line.startswith(f"fedcross: refused a reply of node {NODE}: ")
    assert why in line
    assert line.isprintable()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"message_type": "query"},
        {"message_type": "train.first"},
        {"ago": 20},  # a device's clock
        {"reply_to_message_id": "over", "ago": 9999, "ttl": -3.0},  # a reply that is late
        {"runtime": 0.0},
    ],
)
def test_honest_replies_pass(told: dict[str, Any]) -> None:
    link, told = Link(), dict(told)
    if "ago" in told:
        told["created_at"] = time.time() - told.pop("ago")
    assert wrong(pushed(deep(2), **told), link, time.time()) is None
    limited(link.push, MOST, Ledger(MOST, 1 << 30), Refusals())(request=pushed(deep(2), **told), state=link)
    assert link.pushes == 1


def test_an_error_is_a_reply_and_both_or_nothing_is_none() -> None:
    link, failed, both, empty = Link(), pushed(deep(2)), pushed(deep(2)), pushed(deep(2))
    for request in (failed, both):
        request.messages_list[0].error.code = 2
    for request in (failed, empty):
        request.messages_list[0].ClearField("content")
    assert wrong(failed, link, time.time()) is None
    for code in (REFUSED, *(3, 4, 5)):
        failed.messages_list[0].error.code = code
        assert wrong(failed, link, time.time()) == f"an error with code {code} is the SuperLink's to send"
    assert [wrong(one, link, time.time()) for one in (both, empty)] == ["neither content nor error, or both"] * 2


def test_more_than_one_runtime_is_refused() -> None:
    request = pushed(deep(2))
    request.clientapp_runtime_list.append(1.0)
    assert "took 1.0, 1.0 s" in str(wrong(request, Link(), time.time()))


def test_a_request_is_found_in_flowers_database() -> None:
    """Node and run ids above 2**63 are stored as negative numbers."""
    node, run, engine = 2**64 - 5, 2**63 + 9, create_engine("sqlite://")
    MessageIns.__table__.create(engine)  # type: ignore[attr-defined]
    with Session(engine) as session:
        row = {"message_id": "m", "run_id": uint64_to_int64(run), "dst_node_id": uint64_to_int64(node)}
        session.execute(insert(MessageIns).values(**row, created_at=5.0, ttl=9.0, message_type="train"))
        session.commit()
    state = SimpleNamespace(session=lambda: Session(engine))
    found = asked_for(state, "m")
    assert found is not None
    assert (found.run, found.node, found.created_at, found.until, found.kind) == (run, node, 5.0, 14.0, "train")
    assert asked_for(state, "n") is None


def test_a_device_that_is_silent_for_long_is_not_online(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []
    state = SimpleNamespace(get_node_id_by_public_key={b"k": NODE}.get)

    def handler(request: Any, state: Any) -> str:
        calls.append(request)
        return "answer"

    call = steady(handler, Refusals())
    for seconds in (NAN, INF, 1e300, 1800.0):
        for request in (
            SendNodeHeartbeatRequest(node=Node(node_id=NODE), heartbeat_interval=seconds),
            ActivateNodeRequest(public_key=b"k", heartbeat_interval=seconds),
        ):
            with pytest.raises(HTTPException) as refusal:
                call(request=request, state=state)
            assert refusal.value.status_code == 400
    assert not calls
    assert caplog.text.count(f"refused a heartbeat of node {NODE}: ") == 8
    for seconds in (30.0, HEARTBEAT_S):
        assert call(request=SendNodeHeartbeatRequest(heartbeat_interval=seconds), state=None) == "answer"


def test_flower_refuses_pauses_that_are_none() -> None:
    """Below the limit here, Flower has its own; a pause that is no number would be stored as NULL."""
    state: Any = SimpleNamespace()
    for seconds in (NAN, 0.0, -5.0):
        with pytest.raises(Exception, match="interval"):
            fleet_handlers.send_node_heartbeat(SendNodeHeartbeatRequest(heartbeat_interval=seconds), state)


def test_many_refusals_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    refused = Refusals()
    for _ in range(1000):
        refused(NODE, "a reply", "why")
    refused(2, "a reply", "why")
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 8 + 6 + 1
    assert told[-2].endswith("(512 of it, 512 in all)")
    assert told[-1].endswith("node 2: why (1 of it, 1001 in all)")


def test_a_run_that_does_not_exist_is_no_error_of_the_superlinks(caplog: pytest.LogCaptureFixture) -> None:
    """Flower answers 500, which a device repeats for five minutes."""

    def handler(request: Any, state: Any) -> str:
        return {7: "answer"}[request.run_id]

    call = plain(handler, Refusals(), "object_id")
    assert call(request=PullObjectRequest(node=Node(node_id=NODE), run_id=7), state=Link()) == "answer"
    with pytest.raises(HTTPException) as refusal:
        call(request=PullObjectRequest(node=Node(node_id=NODE), run_id=9), state=Link())
    assert refusal.value.status_code == 404
    assert f"refused a request of node {NODE}: there is no run 9" in caplog.text
    with pytest.raises(KeyError):  # a fault of another kind stays one
        plain(lambda request, state: {}[0], Refusals())(request=PullObjectRequest(run_id=7), state=Link())
