"""Announcements of replies, made by hand, as a hostile device with a registered key can send them."""

from __future__ import annotations

import hashlib
import math
import time
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree

if TYPE_CHECKING:
    from tests.support.light_node import Connection


def name(text: str) -> str:
    """Return the name of an object that stands for `text`."""
    return hashlib.sha256(text.encode()).hexdigest()


def tree(text: str, *children: ObjectTree) -> ObjectTree:
    """Return an object with these children."""
    return ObjectTree(object_id=name(text), children=children)


def shared(levels: int, salt: str = "") -> ObjectTree:
    """Return two objects per level; both have both objects of the next level as children, and only one of them says so.

    Flower 1.41 builds 2 ** (levels + 1) - 1 places of it.
    """

    def branch(side: str, level: int) -> ObjectTree:
        below = level + 1
        if below > levels:
            return tree(f"{salt}{side}{level}")
        left = branch("a", below) if side == "a" else tree(f"{salt}a{below}")
        right = branch("b", below) if side == "a" else tree(f"{salt}b{below}")
        return tree(f"{salt}{side}{level}", left, right)

    return tree(f"{salt}root", branch("a", 1), branch("b", 1))


def deep(levels: int, salt: str = "") -> ObjectTree:
    """Return a chain of this many objects."""
    found = tree(f"{salt}0")
    for level in range(1, levels):
        found = tree(f"{salt}{level}", found)
    return found


def wide(children: int, salt: str = "") -> ObjectTree:
    """Return an object with this many children."""
    return tree(f"{salt}root", *(tree(f"{salt}{child}") for child in range(children)))


class Announcer:
    """Answers the first round with announcements only; honest afterwards."""

    def __init__(self, connection: Connection, levels: int) -> None:
        self.connection, self.levels = connection, levels
        self.lied = False

    def asked_who(self, message: Message, honest: Message) -> None:
        """Answer the server's query: first announce that objects which all others use have no children."""
        if self.lied:
            self.connection.send(honest)
            return
        time.sleep(2.0)  # the SuperLink deletes the query that it has delivered
        tables = [RecordDict({"config": ConfigRecord(one)}) for one in ({}, *({"partition-id": i} for i in range(3)))]
        lies = [ObjectTree(object_id=one.object_id) for one in tables]
        made = tree(f"lie {self.connection.node}", tree(f"lies {self.connection.node}", *lies))
        announce(self.connection, message, made)
        self.lied = True
        print("lie: announced", flush=True)

    def act(self, message: Message, honest: Message) -> None:
        """Answer `message`."""
        if int(str(message.content.config_records["config"]["round"])) > 1:
            self.connection.send(honest)
            return
        for made in (shared(self.levels), wide(7000), deep(90)):
            try:
                announce(self.connection, message, made)
            except Exception as error:  # noqa: BLE001 - a refusal; the next one
                print(f"announcement: {type(error).__name__}: {error}", flush=True)
            else:
                print("announcement: accepted", flush=True)
        order = {"reply_to_message_id": "", "src_node_id": 1, "dst_node_id": self.connection.node}
        forged: list[dict[str, Any]] = [order, {"created_at": math.nan}, {"ttl": math.nan}]
        for number, told in enumerate([*forged, {}]):
            try:  # the last one says that its work took no number of seconds
                announce(self.connection, message, tree(f"forged {number}"), math.nan if not told else 0.0, **told)
            except Exception as error:  # noqa: BLE001 - a refusal; the next one
                print(f"forgery: {type(error).__name__}: {error}", flush=True)
            else:
                print("announcement: accepted", flush=True)


def announce(connection: Connection, message: Message, made: ObjectTree, runtime: float = 0.0, **told: object) -> None:
    """Announce `made` as the reply to `message`, and send no object; `told` replaces parts of its metadata."""
    shell = Message(RecordDict(), reply_to=message)
    shell.metadata.__dict__.update({"_message_id": made.object_id, "_src_node_id": connection.node})
    shell.metadata.__dict__.update({f"_{part}": value for part, value in told.items()})
    connection._send(shell, made, runtime)
