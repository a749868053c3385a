"""Flower's own state of a SuperLink without a SuperLink: a run, its nodes, requests to them and what they answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore import sql_mixin
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.object_store_factory import ObjectStoreFactory
from flwr.supercore.state.alembic.utils import get_combined_metadata
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers as fleet
from flwr.superlink.servicer.runtime import runtime_handlers as runtime

from fedcross.engines.executor.announced import limited
from fedcross.engines.executor.claims import asserted, named
from fedcross.engines.executor.ledger import Ledger
from fedcross.engines.executor.replies import Refusals
from fedcross.engines.executor.stored import within
from fedcross.engines.grid import identify
from fedcross.engines.judged import JudgedGrid

_NUMBERS = itertools.count()


def opened(path: Path | None) -> Any:
    """Return a state in the file `path`; None: in memory. The tables are made at once, not by Flower's migrations."""
    place = FLWR_IN_MEMORY_DB_NAME if path is None else str(path)
    with patch.object(sql_mixin, "run_migrations", get_combined_metadata().create_all):
        return LinkStateFactory(place, NoOpFederationManager(), ObjectStoreFactory(place)).state()


class Run:
    """A run that is on, with nodes that are connected, behind the handlers that :mod:`engines.guarded` replaces.

    Parameters
    ----------
    state : LinkState
        Flower's.
    nodes : int
        How many nodes.
    most, quota : int
        Objects of a reply, and bytes of a node's replies.
    clock : callable, optional
        Tells the time in seconds, for the limits.
    """

    def __init__(
        self,
        state: Any,
        nodes: int = 2,
        most: int = 100,
        quota: int = 1 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        identify()
        self.state = state
        self.nodes = [
            state.create_node(NOOP_FLWR_AID, "noop", f"key {next(_NUMBERS)}".encode(), 300.0) for _ in range(nodes)
        ]
        for node in self.nodes:
            assert state.activate_node(node, 300.0)
        self.id = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        self.task = state.get_run_info(run_ids=[self.id])[0].primary_task_id
        assert state.claim_task(self.task)
        assert state.activate_task(self.task)
        ledger = self.ledger = Ledger(most, quota, clock or time.monotonic, lambda state: None)
        refused = self.refused = Refusals()
        self._announce = limited(fleet.push_messages, most, ledger, refused)
        self._put = within(fleet.push_object, ledger, refused)
        self._ask = asserted(runtime.push_messages, ledger, refused)
        self._pull = named(runtime.pull_messages)
        self._task = SimpleNamespace(run_id=self.id, task_id=self.task)
        self.requests: list[Message] = []
        self.device: Callable[[Message], None] = lambda message: None  # what a device does with a request

    def finish(self) -> None:
        """End the run."""
        assert self.state.finish_task(self.task, SubStatus.COMPLETED, "")

    # ---- the server ---------------------------------------------------------------------------------------------

    def request(self, node: int, content: RecordDict | None = None) -> Message:
        """Send a request to `node`; return it with its name."""
        content = content or RecordDict({"config": ConfigRecord({"n": next(_NUMBERS)})})
        message = Message(content, dst_node_id=node, message_type="train", ttl=3600)
        self.push_messages([message])
        return message

    def push_messages(self, messages: list[Message]) -> list[str]:
        """Store requests of the server, as ``HttpGrid.push_messages`` has them stored."""
        for message in messages:
            message.metadata.__dict__.update(_run_id=self.id, _src_node_id=SUPERLINK_NODE_ID, _message_id="")
            objects, tree = get_all_nested_objects(message), get_object_tree(message)
            message.metadata.__dict__["_message_id"] = tree.object_id
            shell = message_to_proto(remove_content_from_message(message))
            asked = PushAppMessagesRequest(messages_list=[shell], message_object_trees=[tree])
            found = self._ask(asked, self.state, self._task)
            assert found.message_ids == [tree.object_id]
            for name in found.objects_to_push:
                assert self.state.store_object(self.id, found.session_id, name, objects[name].deflate())
        self.requests += messages
        for message in messages:
            self.device(message)
        return [one.metadata.message_id for one in messages]

    def grid(self) -> JudgedGrid:
        """Return the server's grid, which asks this state."""
        state, task = self.state, self._task
        client = SimpleNamespace(
            _client=SimpleNamespace(event_hooks={"response": []}),
            PullMessages=lambda one: self._pull(one, state, task),
            PullObject=lambda one: runtime.pull_object(one, state, task),
            ConfirmMessageReceived=lambda one: runtime.confirm_message_received(one, state, task),
        )
        inner: Any = SimpleNamespace(
            node=Node(node_id=SUPERLINK_NODE_ID), run=SimpleNamespace(run_id=self.id), _runtime_client=client,
            push_messages=self.push_messages, get_node_ids=lambda: self.nodes, get_nodes=lambda: [],
        )  # fmt: skip
        return JudgedGrid(inner)

    # ---- a device -----------------------------------------------------------------------------------------------

    def reply(self, request: Message, content: RecordDict, node: int | None = None, **told: Any) -> Message:
        """Return a reply to `request`; `told` replaces parts of its metadata."""
        asked = request.metadata
        parts = {"src_node_id": asked.dst_node_id if node is None else node, "created_at": time.time(), "ttl": 60.0}
        parts |= {"dst_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": asked.message_id, "run_id": self.id}
        metadata = Metadata(**({"message_id": "", "group_id": "", "message_type": "train"} | parts | told))
        found = make_message(metadata=metadata, content=content)
        metadata.__dict__["_message_id"] = found.object_id
        return found

    @staticmethod
    def parts(message: Message) -> list[Any]:
        """Return the objects of a message."""
        return list(get_all_nested_objects(message).values())

    def announce(
        self, message: Message, node: int, made: ObjectTree | None = None, **told: Any
    ) -> PushMessagesResponse:
        """Announce a reply as `node`; tree and fields that are given stand in the announcement instead."""
        proto = message_to_proto(remove_content_from_message(message))
        tree = made or get_object_tree(message)
        proto.metadata.message_id = tree.object_id
        for part, value in told.items():
            setattr(proto.metadata, part, value)
        asked = PushMessagesRequest(
            node=Node(node_id=node), messages_list=[proto], message_object_trees=[tree], clientapp_runtime_list=[1.0]
        )
        found: PushMessagesResponse = self._announce(request=asked, state=self.state)
        return found

    def put(self, node: int, session: str, name: str, content: bytes) -> bool:
        """Push one object; return whether it is stored."""
        asked = PushObjectRequest(
            node=Node(node_id=node), run_id=self.id, session_id=session, object_id=name, object_content=content
        )
        return bool(self._put(request=asked, state=self.state).stored)

    def send(self, message: Message, node: int) -> int:
        """Announce a reply and push what the SuperLink wants of it; return how many objects it took."""
        objects, answer = get_all_nested_objects(message), self.announce(message, node)
        done = [self.put(node, answer.session_id, one, objects[one].deflate()) for one in answer.objects_to_push]
        return sum(done)
