"""One device lies about the children of an object that the server, or another device, uses: nobody else is held up."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree

from fedcross.core.allowance import NO_ARRAYS, Allowance, Arrays, Refusal
from fedcross.engines.executor import claims
from fedcross.engines.executor.ledger import HOLD_S
from fedcross.engines.executor.replies import Later
from fedcross.strategies.wire.records import encode
from tests.support.clock import Clock
from tests.support.link_state import Run, opened
from tests.support.trees import name, tree

QUERY = RecordDict({"config": ConfigRecord({})})
ANSWER = RecordDict({"config": ConfigRecord({"partition-id": 0})})
MODEL = RecordDict({"arrays": encode({"w": np.zeros(10, np.float32)}), "config": ConfigRecord({"round": 1})})


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened(None if request.param == "memory" else tmp_path_factory.mktemp("state") / "state.db")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(state: Any, clock: Clock) -> Iterator[Run]:
    found = Run(state, clock=clock.monotonic)
    yield found
    over(found)


def over(run: Run) -> None:
    """End the run; nothing of a dispute is left over."""
    run.finish()
    run.state.cleanup_run(run.id)
    assert len(run.state.object_store) == 0


def parents(content: RecordDict) -> list[str]:
    """Return the names of all objects of `content` that have children."""
    return [one.object_id for one in iterate_object_tree(get_object_tree(content)) if one.children]


def lie(run: Run, liar: int, names: list[str], children: tuple[ObjectTree, ...] = ()) -> Message:
    """Let `liar` announce that these objects have these children; return the request to which that is a reply."""
    request = run.request(liar)
    number = request.metadata.message_id
    false = [ObjectTree(object_id=one, children=children) for one in names]
    made = tree(f"message {number}", tree(f"table {number}", *false))
    assert run.announce(run.reply(request, RecordDict()), liar, made).objects_to_push
    return request


def got(run: Run, request: Message, allowed: Allowance = NO_ARRAYS) -> Message | None:
    """Return what the server gets for `request`."""
    grid = run.grid()
    grid.allow({request.metadata.message_id: allowed})
    found = list(grid.pull_messages([request.metadata.message_id]))
    return found[0] if found else None


def ended(run: Run, request: Message) -> bool:
    """Return whether the server has been told that the reply to `request` is refused for a lie."""
    found = got(run, request)
    return found is not None and isinstance(found.error, Refusal) and "other children" in str(found.error.reason)


def delivered(run: Run, request: Message) -> ObjectTree:
    """Return the request's tree as its device gets it."""
    found: ObjectTree = run.state.object_store.get_object_tree(request.metadata.message_id)
    return found


def same(one: ObjectTree, other: ObjectTree) -> bool:
    """Return whether the trees are equal; Flower's database knows no order of children."""
    pairs = zip(*(sorted(side.children, key=lambda child: child.object_id) for side in (one, other)), strict=False)
    return (
        (one.object_id, len(one.children)) == (other.object_id, len(other.children))
        and all(same(*pair) for pair in pairs)
    )  # fmt: skip


@pytest.mark.parametrize("content", [QUERY, MODEL], ids=["query", "model"])
@pytest.mark.parametrize("children", [(), (tree("junk"),)], ids=["none", "others"])
def test_the_server_is_not_held_up(
    run: Run, content: RecordDict, children: tuple[ObjectTree, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Objects that the server will send are announced before with other children: with none, or with others."""
    liar, honest = run.nodes
    lied = lie(run, liar, [*parents(content)[:-1], content.object_id], children)
    request = run.request(honest, content)
    assert same(delivered(run, request), get_object_tree(request))
    assert ended(run, lied)
    assert f"refused a reply of node {liar}: {claims.LIE}" in caplog.text
    assert run.send(run.reply(request, ANSWER), honest)
    assert got(run, request) is not None


def test_nobody_changes_what_the_server_is_sending(run: Run) -> None:
    """A device announces it with other children while the server's objects are on their way."""
    liar, honest = run.nodes
    message = Message(MODEL, dst_node_id=honest, message_type="train", ttl=3600)
    message.metadata.__dict__.update(_run_id=run.id, _src_node_id=1, _message_id="")
    made = get_object_tree(message)
    message.metadata.__dict__["_message_id"] = made.object_id
    shell = message_to_proto(remove_content_from_message(message))
    asked = PushAppMessagesRequest(messages_list=[shell], message_object_trees=[made])
    run._ask(asked, run.state, run._task)
    for false in parents(MODEL):
        with pytest.raises(HTTPException, match="object of the server"):
            lie(run, liar, [false], (tree("junk"),))
    assert same(delivered(run, message), made)


def test_a_lie_just_before_the_servers_announcement_is_stored(run: Run) -> None:
    """The database refuses the server once; its call is repeated. The store in memory is put right."""
    liar, honest = run.nodes
    asked, content = run.request(liar), RecordDict({"config": ConfigRecord({"n": -1})})
    made = tree("message", tree("table", ObjectTree(object_id=content.object_id)))
    inner, late = run._ask.__wrapped__, [1]  # type: ignore[attr-defined]

    def push_messages(*arguments: Any) -> Any:
        if late.pop():
            late.append(0)
            assert run.announce(run.reply(asked, RecordDict()), liar, made).objects_to_push
        late.append(0)
        return inner(*arguments)

    run._ask = claims.asserted(push_messages, run.ledger, run.refused)
    try:
        request = run.request(honest, content)
    except ValueError:
        request = run.request(honest, content)
    assert same(delivered(run, request), get_object_tree(request))


def test_another_device_is_held_up_for_one_retry_at_most(run: Run, clock: Clock) -> None:
    liar, honest = run.nodes
    request = run.request(honest)
    lied = lie(run, liar, [ANSWER.object_id])
    reply = run.reply(request, ANSWER)
    with pytest.raises(Later):
        run.announce(reply, honest)
    clock.now += HOLD_S
    assert run.send(reply, honest)
    found = got(run, request)
    assert found is not None
    assert found.content["config"]["partition-id"] == 0
    assert ended(run, lied)


@pytest.mark.slow
def test_a_lie_while_another_device_sends_changes_nothing_for_it(run: Run, clock: Clock) -> None:
    """At once it is put off; later it stands until the honest content comes."""
    liar, honest = run.nodes
    request, content = run.request(honest), RecordDict({"arrays": encode({"w": np.ones(10, np.float32)})})
    reply = run.reply(request, content)
    objects, answer = get_all_nested_objects(reply), run.announce(reply, honest)
    grid = run.grid()
    grid.allow({request.metadata.message_id: Allowance(arrays={"arrays": Arrays(9, 1 << 20)}, scalars=None)})
    with pytest.raises(Later):
        lie(run, liar, parents(content))
    assert list(grid.pull_messages([request.metadata.message_id])) == []  # the server knows the tree now
    clock.now += HOLD_S
    lied = lie(run, liar, parents(content))
    assert all(run.put(honest, answer.session_id, one, objects[one].deflate()) for one in answer.objects_to_push)
    grid._arrived[0].next = 0.0
    [found] = grid.pull_messages([request.metadata.message_id])
    assert found.has_content()
    assert ended(run, lied)
    assert not [one for one in objects if one in run.state.object_store]  # the dispute is over, nothing is kept


def test_what_is_stored_is_not_announced_otherwise(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    liar, honest = run.nodes
    request = run.request(honest, MODEL)
    asked = run.request(liar)
    made = tree("message", tree("table", ObjectTree(object_id=MODEL.object_id)))
    with pytest.raises(HTTPException, match=claims.LIE):
        run.announce(run.reply(asked, RecordDict()), liar, made)
    assert f"refused a reply of node {liar}" in caplog.text
    assert ended(run, asked)
    assert same(delivered(run, request), get_object_tree(request))


def test_a_content_that_is_not_what_its_sender_announced_ends_the_reply(run: Run) -> None:
    liar, _ = run.nodes
    asked = run.request(liar)
    made = tree("message", tree("table", ObjectTree(object_id=ANSWER.object_id)))
    answer = run.announce(run.reply(asked, RecordDict()), liar, made)
    with pytest.raises(HTTPException, match="other children than its content"):
        run.put(liar, answer.session_id, ANSWER.object_id, ANSWER.deflate())
    assert ended(run, asked)
    assert made.object_id not in run.state.object_store


@pytest.mark.slow
def test_a_lie_that_an_older_superlink_has_stored(state: Any) -> None:
    """After a restart nobody knows who has said what; what is stored, or is being sent, decides all the same."""
    before = Run(state, nodes=3)
    liar, honest, second = before.nodes
    lie(before, liar, [QUERY.object_id, ANSWER.object_id])
    asked = before.request(liar)
    false = RecordDict({"config": ConfigRecord({"partition-id": 7})})
    made = tree("a message", tree("a table", ObjectTree(object_id=false.object_id)))
    session = before.announce(before.reply(asked, RecordDict()), liar, made).session_id
    after = Run(state, nodes=0)
    before._announce, before._put, before._ask = after._announce, after._put, after._ask
    request = before.request(honest, QUERY)
    assert same(delivered(before, request), get_object_tree(request))
    for one in (request, before.request(second, QUERY)):
        assert before.send(before.reply(one, ANSWER), one.metadata.dst_node_id)
        assert got(before, one) is not None
    with pytest.raises(HTTPException, match="other children than its content"):
        before.put(liar, session, false.object_id, false.deflate())
    assert ended(before, asked)
    after.finish()
    over(before)


@pytest.mark.slow
def test_a_reply_does_not_grow_by_what_others_announce(run: Run, clock: Clock) -> None:
    """Each announcement says of the lowest object of the last one that it has many children; the server asks late."""
    first = None
    for step in range(4):
        request = run.request(run.nodes[step % 2])
        number = request.metadata.message_id
        middle = [tree(f"{side}{step}", tree(f"lowest {step}")) for side in range(20)]
        made = tree(f"m {number}", tree(f"lowest {step - 1}", *middle))
        run.announce(run.reply(request, RecordDict()), run.nodes[step % 2], made)
        first = first or request
        clock.now += 100
    assert first is not None
    asked = PullAppMessagesRequest(message_ids=[first.metadata.message_id])
    [found] = run._pull(asked, run.state, run._task).message_object_trees
    places = list(iterate_object_tree(found))
    assert len(places) == len({one.object_id for one in places}) == 2 + 4 * 21
    assert name("lowest 3") in {one.object_id for one in places}


def test_a_reply_that_is_not_there_is_told_as_flower_tells_it() -> None:
    state = opened(None)
    handler = claims.named(lambda request, state, task: state.object_store.get_object_tree(name("nothing")))
    with pytest.raises(Exception, match="not pre-registered"):
        handler(None, state, SimpleNamespace())
