"""A SuperLink behind the handlers that :mod:`fedcross.engines.guarded` replaces, and what devices push there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

NODE, RUN = 4711, 7


def pushed(*trees: ObjectTree, node: int = NODE, runtime: float = 1.0, **told: Any) -> PushMessagesRequest:
    """Return what announces `trees` as replies of `node` to its request; `told` replaces parts of their metadata."""
    messages = []
    for one in trees:
        honest = {"message_id": one.object_id, "run_id": RUN, "src_node_id": node, "dst_node_id": 1, "ttl": 60.0}
        honest |= {"reply_to_message_id": f"to {node}", "message_type": "train", "created_at": time.time()}
        messages.append(ProtoMessage(metadata=Metadata(**(honest | told))))  # type: ignore[arg-type]
        messages[-1].content.SetInParent()
    return PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=messages,
        message_object_trees=trees,
        clientapp_runtime_list=[runtime],
    )


class Link:
    """Stores what it is told; there is one request to each of a few nodes, named ``to NODE``."""

    def __init__(self) -> None:
        self.object_store = InMemoryObjectStore(verify=False)
        self.message_ins_store = {f"to {node}": self._request(node) for node in (*range(2, 20), NODE)}
        self.message_ins_id_to_message_res_id: dict[str, str] = {}
        self.message_res_store: dict[str, SimpleNamespace] = {}
        self._object_push_session_by_root: dict[str, str] = {}
        self.errors: list[Message] = []  # in the place of refused replies
        self.pushes = 0

    @staticmethod
    def _request(node: int) -> SimpleNamespace:
        told = SimpleNamespace(run_id=RUN, dst_node_id=node, created_at=time.time(), ttl=60.0, message_type="train")
        return SimpleNamespace(metadata=told)

    def get_run_info(self, run_ids: list[int]) -> list[int]:
        """Return the runs that there are."""
        return [run for run in run_ids if run == RUN]

    def push(self, request: PushMessagesRequest, state: Link) -> PushMessagesResponse:
        """Stand for Flower's handler of announced replies."""
        assert state is self
        self.pushes += 1
        [message] = request.messages_list
        self.message_ins_id_to_message_res_id[message.metadata.reply_to_message_id] = message.metadata.message_id
        told = SimpleNamespace(
            src_node_id=message.metadata.src_node_id, reply_to_message_id=message.metadata.reply_to_message_id
        )
        self.message_res_store[message.metadata.message_id] = SimpleNamespace(metadata=told)
        wanted = self.object_store.preregister(RUN, request.message_object_trees[0])
        return PushMessagesResponse(objects_to_push=wanted, session_id="s")

    def start_session(self, run: int) -> str:
        """Return a session for an upload."""
        assert run == RUN
        return "s"

    def _cleanup_push_session(self, session: str | None, *, cleanup_messages: bool) -> None:
        assert not cleanup_messages

    def store_message_and_object_tree(self, message: Message, made: ObjectTree, session: str) -> tuple[bool, list[str]]:
        """Keep an error of the SuperLink's own."""
        self.errors.append(message)
        return True, []

    def push_object(self, request: PushObjectRequest, state: Link) -> PushObjectResponse:
        """Stand for Flower's handler of a reply's objects."""
        assert state is self
        self.object_store.put(request.object_id, request.object_content)
        return PushObjectResponse(stored=True)


def put(name: str, content: bytes, node: int = NODE) -> PushObjectRequest:
    """Return what pushes an object's content."""
    return PushObjectRequest(
        node=Node(node_id=node), run_id=RUN, session_id="s", object_id=name, object_content=content
    )
