"""The grid that judges replies, on a SuperLink made of dictionaries; a real one: tests/faults/test_bombs.py."""

from types import SimpleNamespace

import flwr
import httpx
import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.superlink.grid import HttpGrid

from fedcross.core.allowance import Allowance, Arrays, Refusal
from fedcross.engines import judged as module
from fedcross.engines import object_client
from fedcross.engines.grid import LocalGrid, identify
from fedcross.engines.guarded import CHECKED
from fedcross.engines.judged import JudgedGrid, judged
from fedcross.engines.lost_nodes import LOOK_S, LostNodes
from fedcross.strategies.wire.records import encode
from tests.support.clock import Clock

MODEL = {"w": np.arange(1000, dtype=np.float32)}
ALLOWED = Allowance({"arrays": Arrays(1, 5000)}, frozenset({"metrics", "config"}))


class SuperLink:
    """Replies, their objects and what was asked for; it stands for Flower's grid and for that grid's client."""

    def __init__(self):
        identify()
        self.node, self.run = Node(node_id=1), SimpleNamespace(run_id=1)
        self._runtime_client = self
        self._client = SimpleNamespace(event_hooks={"response": []})
        self.replies, self.objects, self.asked, self.confirmed, self.sent = [], {}, [], [], []
        self.missing, self.gone, self.failing, self.nodes = set(), set(), [], [7, 8]

    def request(self, node=7):
        message = Message(RecordDict({"config": ConfigRecord({})}), dst_node_id=node, message_type="train")
        message.metadata.__dict__["_message_id"] = f"asked-{len(self.sent)}"
        self.sent.append(message)
        return message

    def answers(self, request, content, **inside):
        """Store a reply to `request`; `inside` is what its own metadata say otherwise."""
        reply = Message(content, reply_to=request)
        outside = message_to_proto(remove_content_from_message(reply))
        for name, value in inside.items():
            reply.metadata.__dict__[f"_{name}"] = value
        self.objects |= {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
        outside.metadata.message_id = reply.object_id
        self.replies.append((outside, get_object_tree(reply)))
        return reply.object_id

    def PullMessages(self, request):
        found = [one for one in self.replies if one[0].metadata.reply_to_message_id in request.message_ids]
        self.replies = [one for one in self.replies if one not in found]
        return PullAppMessagesResponse(
            messages_list=[one for one, _ in found], message_object_trees=[tree for _, tree in found]
        )

    def PullObject(self, request):
        name = request.object_id
        self.asked.append(name)
        there, found = name not in self.missing, name not in self.gone
        content = self.objects[name] if there and found else b""
        return PullObjectResponse(object_found=found, object_available=there and found, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)

    def push_messages(self, messages):
        if self.failing:
            raise self.failing.pop()
        return [one.object_id for one in messages]

    def get_node_ids(self):
        return self.nodes


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(object_client, "time", found)
    return found


@pytest.fixture
def link():
    return SuperLink()


@pytest.fixture
def grid(link):
    return JudgedGrid(link)


def content(model=MODEL, **more):
    return RecordDict({"arrays": encode(model), "metrics": MetricRecord({"num-examples": 3}), **more})


def test_the_version_of_flower_is_the_one_that_was_looked_at():
    assert flwr.__version__ in CHECKED, "compare HttpGrid.pull_messages with engines/judged.py"


def test_only_flowers_grid_of_a_deployment_is_judged():
    local = LocalGrid(lambda *_: None, 1, {})
    assert judged(local) is local
    found = judged(HttpGrid(token="t"))
    assert isinstance(found, JudgedGrid)
    assert judged(found) is found


def test_a_true_reply_comes_through_as_flower_would_have_it(grid, link):
    request = link.request()
    name = link.answers(request, content())
    grid.allow({"asked-0": ALLOWED})
    (reply,) = grid.pull_messages(["asked-0"])
    assert (reply.content.array_records["arrays"]["w"].numpy() == MODEL["w"]).all()
    assert reply.content.metric_records["metrics"]["num-examples"] == 3
    assert (reply.metadata.message_id, reply.metadata.src_node_id) == (name, 7)
    assert link.confirmed == [name]
    assert list(grid.pull_messages(["asked-0"])) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (content({"w": np.zeros(2000, np.float32)}), "too_large"),
        (content({"v": MODEL["w"], "w": MODEL["w"]}), "too_large"),
        (content(more=ConfigRecord({})), "malformed_message"),
    ],
)
def test_a_refused_reply_is_an_error_with_its_reason_and_leaves_the_superlink(grid, link, bad, why):
    name = link.answers(link.request(), bad)
    grid.allow({"asked-0": ALLOWED})
    (reply,) = grid.pull_messages(["asked-0"])
    assert isinstance(reply.error, Refusal)
    assert reply.error.kind == why
    assert (reply.metadata.reply_to_message_id, reply.metadata.src_node_id) == ("asked-0", 7)
    assert link.confirmed == [name]


def test_without_a_word_a_reply_has_no_arrays(grid, link):
    link.answers(link.request(), content())
    link.answers(link.request(8), RecordDict({"config": ConfigRecord({"partition-id": 3})}))
    first, second = grid.pull_messages(["asked-0", "asked-1"])
    assert first.error.kind == "malformed_message"
    assert second.content.config_records["config"]["partition-id"] == 3


@pytest.mark.parametrize("name", ["src_node_id", "reply_to_message_id", "run_id", "dst_node_id"])
def test_what_the_reply_says_of_itself_must_be_what_the_superlink_checked(grid, link, name):
    link.answers(link.request(), RecordDict({}), **{name: "asked-1" if name == "reply_to_message_id" else 1000})
    (reply,) = grid.pull_messages(["asked-0"])
    assert reply.error.kind == "malformed_message"
    assert reply.metadata.reply_to_message_id == "asked-0"


def test_an_error_of_a_client_and_one_of_flower_come_through(grid, link):
    link.answers(link.request(), Error(2, "boom"))
    (reply,) = grid.pull_messages(["asked-0"])
    assert (reply.error.code, reply.error.reason) == (2, "boom")


@pytest.mark.parametrize("announced", [RecordDict({}), Error(2, "boom")])
def test_a_device_does_not_speak_in_the_superlinks_name(grid, link, announced):
    """The SuperLink refuses its own codes where they are announced, so what is sent must be what was announced."""
    request = link.request()
    link.answers(request, Error(module.REFUSED, "in the SuperLink's name"))
    [(outside, tree)] = link.replies
    link.replies = [(message_to_proto(Message(announced, reply_to=request)), tree)]
    link.replies[0][0].metadata.CopyFrom(outside.metadata)
    (reply,) = grid.pull_messages(["asked-0"])
    assert reply.error.kind == "malformed_message"
    assert "SuperLink" not in reply.error.reason


def test_a_request_to_a_device_that_is_gone_is_answered_as_flower_would(grid, link, clock):
    grid._lost = LostNodes(grid.get_node_ids, clock.monotonic)
    names = list(grid.push_messages([link.request(7), link.request(8)]))
    link.nodes = [8]
    for _ in range(2):
        assert list(grid.pull_messages(names)) == []
        clock.now += LOOK_S
    (reply,) = grid.pull_messages(names)
    assert (reply.error.code, reply.metadata.src_node_id) == (ErrorCode.NODE_UNAVAILABLE, 1)
    assert reply.metadata.reply_to_message_id == names[0]


def test_a_device_that_announces_its_reply_and_is_gone_keeps_nobody_waiting(grid, link, clock):
    grid._lost = LostNodes(grid.get_node_ids, clock.monotonic)
    grid._lost.sent({"asked-0": 7, "asked-1": 7})
    half, whole = (link.answers(link.request(7), content(model)) for model in ({"w": MODEL["w"] + 1}, MODEL))
    grid.allow({"asked-0": ALLOWED, "asked-1": ALLOWED})
    link.missing = {half}
    link.nodes = [8]
    replies = []
    for _ in range(4):
        replies += grid.pull_messages({"asked-0", "asked-1"} - {one.metadata.reply_to_message_id for one in replies})
        clock.now += LOOK_S
    taken, lost = replies  # what was sent as a whole counts, though its device is gone
    assert (taken.content.array_records["arrays"]["w"].numpy() == MODEL["w"]).all()
    assert (lost.metadata.reply_to_message_id, lost.error.code) == ("asked-0", ErrorCode.NODE_UNAVAILABLE)
    assert "announced its reply and not sent all of it" in lost.error.reason
    assert sorted(link.confirmed) == sorted([half, whole])
    assert not grid._arrived


def test_an_unfinished_reply_keeps_nobody_waiting_and_keeps_nothing(grid, link, clock):
    half = link.answers(link.request(), content())
    link.answers(link.request(8), RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}))
    grid.allow({"asked-0": ALLOWED})
    link.missing = {name for name, data in link.objects.items() if data.startswith(b"ArrayChunk")}
    ids = ["asked-0", "asked-1"]
    (other,) = grid.pull_messages(ids)
    assert other.metadata.reply_to_message_id == "asked-1"
    before = len(link.asked)
    assert list(grid.pull_messages(ids)) == []  # its pause is not over
    assert len(link.asked) == before
    link.missing.clear()
    clock.now += 1
    (reply,) = grid.pull_messages(ids)
    assert (reply.content.array_records["arrays"]["w"].numpy() == MODEL["w"]).all()
    assert link.confirmed[-1] == half


def test_a_reply_that_is_never_finished_is_refused(grid, link, clock):
    link.answers(link.request(), content())
    grid.allow({"asked-0": ALLOWED})
    link.missing = {name for name, data in link.objects.items() if data.startswith(b"ArrayChunk")}
    replies, looks = [], 0
    while not replies:
        replies, looks = list(grid.pull_messages(["asked-0"])), looks + 1
        clock.now += 1
    assert replies[0].error.kind == "incomplete"
    assert module.COMPLETE_S <= clock.now < module.COMPLETE_S + 2 * object_client.LONGEST_PAUSE_S
    assert len(link.asked) < looks  # less and less often


def test_a_reply_whose_first_object_is_not_there_costs_one_small_request_a_look(grid, link, clock):
    name = link.answers(link.request(), content())
    link.missing = {name}
    for _ in range(3):
        assert list(grid.pull_messages(["asked-0"])) == []
        clock.now += 100
    assert link.asked == [name] * 3


def test_a_reply_that_was_lost_is_one_that_flower_lost(grid, link):
    link.gone = {link.answers(link.request(), content())}
    (reply,) = grid.pull_messages(["asked-0"])
    assert (reply.error.code, reply.metadata.src_node_id) == (ErrorCode.MESSAGE_UNAVAILABLE, 1)
    assert reply.metadata.reply_to_message_id == "asked-0"


def test_one_call_hands_over_one_reply_of_a_node_and_no_more_bytes_than_the_quota(grid, link, monkeypatch):
    for node in (7, 7, 8, 9):
        link.answers(link.request(node), content())
    ids = [f"asked-{i}" for i in range(4)]
    grid.allow(dict.fromkeys(ids, ALLOWED))
    monkeypatch.setattr(module, "QUOTA", 2 * ALLOWED.nbytes)
    order = [[reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)] for _ in range(3)]
    assert order == [["asked-0", "asked-2"], ["asked-1", "asked-3"], []]
    monkeypatch.setattr(module, "QUOTA", 1)  # a single reply always comes through
    grid.allow({"asked-4": ALLOWED})
    link.answers(link.request(), content())
    assert len(list(grid.pull_messages(["asked-4"]))) == 1


def test_a_reply_that_nobody_waits_for_any_more_is_dropped(grid, link, clock):
    name = link.answers(link.request(), content())
    link.missing = {name}
    grid.pull_messages(["asked-0"])
    assert list(grid.pull_messages(["asked-9"])) == []
    assert link.confirmed == [name]


def test_an_announcement_that_cannot_be_read_costs_its_own_slot_only(grid, link):
    """Trees of several replies that share objects can be nested deeper than any of them was when it was sent."""
    true = link.PullMessages

    def unreadable(request):
        if "asked-0" in request.message_ids:
            raise ValueError("Invalid protobuf response payload")
        return true(request)

    link.PullMessages = unreadable
    for node in (7, 8):
        link.answers(link.request(node), RecordDict({}))
    ids = ["asked-0", "asked-1"]
    assert list(grid.pull_messages(ids)) == []
    first, second = grid.pull_messages(ids)
    assert (first.error.kind, first.metadata.reply_to_message_id) == ("malformed_message", "asked-0")
    assert second.metadata.reply_to_message_id == "asked-1"


def test_requests_whose_time_is_over_while_the_superlink_is_busy_are_given_up(grid, link, clock):
    """The SuperLink refuses an expired message with status 500, for ever: the run goes on without these slots."""
    message = link.request()
    clock.now = message.metadata.created_at + message.metadata.ttl - 0.1
    answer = httpx.Response(500)
    busy = httpx.HTTPStatusError("500", request=httpx.Request("POST", "http://h"), response=answer)
    link.failing = [busy] * 3
    assert list(grid.push_messages([message])) == [""]
    assert len(link.failing) == 2  # asked once; after the pause the message was too old
    assert list(grid.push_messages([])) == []


def test_requests_that_could_not_be_stored_are_sent_again_as_new_ones(grid, link, clock):
    clock.now = 2e9
    message = link.request()
    first = message.object_id
    link.failing = [ObjectPushError("o", 1, "s")]
    (name,) = grid.push_messages([message])
    assert name != first
    link.failing = [ObjectPushError("o", 1, "s")] * module.PUSHES
    with pytest.raises(ObjectPushError):
        grid.push_messages([message])
