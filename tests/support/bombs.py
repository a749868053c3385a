"""Replies made by hand, object by object, as a hostile device with a registered key can send them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.message_pb2 import ObjectTree

if TYPE_CHECKING:
    from tests.support.light_node import Connection

MIB = 2**20
#: What the bomb inflates to, in MiB.
INFLATED = 2200


@dataclass
class Objects:
    """The objects of one reply: contents by name, and the tree that is announced."""

    contents: dict[str, bytes] = field(default_factory=dict)
    trees: dict[str, ObjectTree] = field(default_factory=dict)

    def add(self, kind: str, children: Sequence[str], body: bytes, *, length: int | None = None) -> str:
        """Add one object and return its name."""
        told = len(body) if length is None else length
        content = f"{kind} {','.join(children)} {told}".encode() + b"\0" + body
        name = hashlib.sha256(content).hexdigest()
        self.contents[name] = content
        self.trees[name] = ObjectTree(object_id=name, children=[self.trees[one] for one in children])
        return name

    def scalars(self, record: ConfigRecord | MetricRecord) -> str:
        """Add a record of scalars."""
        content = record.deflate()
        name = hashlib.sha256(content).hexdigest()
        self.contents[name], self.trees[name] = content, ObjectTree(object_id=name)
        return name

    def array(self, chunks: Sequence[bytes], order: Sequence[int], **declared: Any) -> str:
        """Add an array of these chunks in this order."""
        names = [self.add("ArrayChunk", [], chunk) for chunk in chunks]
        told = {"dtype": "uint8", "shape": [1], "stype": "safetensors", "arraychunk_ids": list(order), **declared}
        return self.add("Array", names, json.dumps(told).encode())

    def record(self, arrays: dict[str, str]) -> str:
        """Add a record of arrays."""
        return self.add("ArrayRecord", list(dict.fromkeys(arrays.values())), json.dumps(arrays).encode())

    def table(self, records: dict[str, str]) -> str:
        """Add the table of records."""
        return self.add("RecordDict", list(dict.fromkeys(records.values())), json.dumps(records).encode())

    def message(self, table: str | None, metadata: ProtoMetadata) -> str:
        """Add the message."""
        return self.add("Message", [table] if table else [], ProtoMessage(metadata=metadata).SerializeToString())


def origin(message: Message) -> ConfigRecord:
    """Return the scalars that link a reply to its request."""
    asked = message.content.config_records["config"]
    return ConfigRecord({name: asked[name] for name in ("run", "round", "exchange", "client", "slot", "nonce")})


def reply_of(objects: Objects, message: Message, metadata: ProtoMetadata, records: dict[str, str]) -> str:
    """Add a reply with these records of arrays and true scalars; return its name."""
    true = {"config": objects.scalars(origin(message)), "metrics": objects.scalars(MetricRecord({"num-examples": 9}))}
    return objects.message(objects.table({**true, **records}), metadata)


def zeros(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """Arrays of 2,200 MiB, all chunks equal."""
    chunk = bytes(5 * MIB)
    array = objects.array([chunk], [0] * (INFLATED // 5), shape=[INFLATED * MIB])
    return reply_of(objects, message, metadata, {"arrays": objects.record({"packed": array})})


def names(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """Twenty thousand names of one array."""
    array = objects.array([bytes(100)], [0])
    return reply_of(
        objects, message, metadata, {"arrays": objects.record({f"{i:05d}" + "x" * 200: array for i in range(20_000)})}
    )


def config(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """Scalars of 4 MiB."""
    large = objects.scalars(ConfigRecord({"nonce": b"x" * (4 * MIB)}))
    return objects.message(objects.table({"config": large}), metadata)


def many(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """A hundred objects where a few belong."""
    array = objects.array([i.to_bytes(4, "big") for i in range(100)], range(100))
    return reply_of(objects, message, metadata, {"arrays": objects.record({"packed": array})})


def deep(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """Tables within tables."""
    inner = objects.table({})
    for _ in range(60):
        inner = objects.table({"deeper": inner})
    return objects.message(inner, metadata)


def unreadable(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """A table that is no JSON."""
    return objects.message(objects.add("RecordDict", [], b"\xff{"), metadata)


def foreign_kind(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """Metrics that are a chunk."""
    chunk = objects.add("ArrayChunk", [], b"123")
    return objects.message(objects.table({"metrics": chunk, "config": objects.scalars(origin(message))}), metadata)


def not_an_array(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """A declaration that Flower's own class chokes on."""
    array = objects.array([b"1"], [0], shape=["one"], dtype=7)
    return reply_of(objects, message, metadata, {"arrays": objects.record({"packed": array})})


def forged(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """Inside, the reply says that it is the SuperLink's: this node is gone."""
    inside = ProtoMetadata()
    inside.CopyFrom(metadata)
    inside.src_node_id = 1
    return objects.message(objects.table({"config": objects.scalars(origin(message))}), inside)


def unfinished(objects: Objects, message: Message, metadata: ProtoMetadata) -> str:
    """One chunk is announced but never sent."""
    array = objects.array([b"a" * 50, b"b" * 50], [0, 1])
    last = reply_of(objects, message, metadata, {"arrays": objects.record({"packed": array})})
    missing = next(name for name, content in objects.contents.items() if content.endswith(b"b" * 50))
    del objects.contents[missing]
    return last


Make = Callable[[Objects, Message, ProtoMetadata], str]
#: How a reply is made -> why the server must reject it; the last one is only missing at the deadline.
KINDS: dict[Make, str | None] = {
    zeros: "too_large",
    names: "too_large",
    config: "too_large",
    many: "too_large",
    deep: "malformed_message",
    unreadable: "malformed_message",
    foreign_kind: "malformed_message",
    not_an_array: "malformed_message",
    forged: "malformed_message",
    unfinished: None,
}


def counted(make: Make) -> dict[str, int]:
    """Return what a round counts as rejected in which a device answers with `make`, over a network.

    The server asks once more after a reply that it rejects: somebody else may have sent it in the device's name. The
    SuperLink refuses a nested tree when it is announced (engines/executor/announced.py), and tells the server.
    """
    why = "refused" if make is deep else KINDS[make]
    return {} if why is None else {why: 2}


class Bomber:
    """Answers round r with kind r - 1 of :data:`KINDS`; honest afterwards.

    Parameters
    ----------
    connection : Connection
        A registered node's connection.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def act(self, message: Message, honest: Message) -> None:
        """Answer `message`."""
        number = int(str(message.content.config_records["config"]["round"])) - 1
        if number >= len(KINDS):
            self.connection.send(honest)
            return
        send(self.connection, list(KINDS)[number], message, honest)


def send(connection: Connection, make: Make, message: Message, honest: Message) -> None:
    """Send what `make` makes, as the reply to `message`."""
    from flwr.common.serde import metadata_to_proto

    objects = Objects()
    metadata = metadata_to_proto(honest.metadata)
    metadata.message_id = ""
    root = make(objects, message, metadata)
    shell = Message(RecordDict(), reply_to=message)  # what the SuperLink checks; it never sees the content
    shell.metadata.__dict__.update({"_message_id": root, "_src_node_id": connection.node})
    wanted, session = connection._send(shell, objects.trees[root], 0.0)
    run = message.metadata.run_id
    for name in wanted:
        if name in objects.contents:
            connection._push(run, session, name, objects.contents[name])
