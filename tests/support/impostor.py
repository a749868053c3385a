"""What a malicious node sends over a real network beside its own reply (for :mod:`tests.support.light_node`)."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Message

from fedcross.strategies.wire.protocol import reply
from fedcross.strategies.wire.records import views

if TYPE_CHECKING:
    from tests.support.light_node import Connection

#: Kinds, each sent ``FEDCROSS_ATTACKS`` times a round.
KINDS = ("duplicate", "replay", "spoof")


class Impostor:
    """One node's misdeeds.

    Parameters
    ----------
    kind : str
        ``duplicate``: after its own reply it answers again, otherwise. ``replay``: its first round's reply, first.
        ``spoof``: it answers requests to another node in that node's name, whose id and messages it has somehow seen.
    connection : Connection
        Its connection.
    log : Path
        The nodes' common log; what became of each message goes to ``NAME.attack``.
    """

    def __init__(self, kind: str, connection: Connection, log: Path) -> None:
        self.kind, self.connection = kind, connection
        self.seen = log.with_suffix(".requests")
        self.told = log.with_suffix(".attack")
        self.count = int(os.environ["FEDCROSS_ATTACKS"])
        self._old: Any = None

    def act(self, message: Message, honest: Message) -> None:
        """Answer `message`, as the kind says."""
        if self.kind == "duplicate":
            self.connection.send(honest)
        if self.kind == "replay" and self._old is None:
            self._old = honest.content
            self.connection.send(honest)
            return
        for number in range(self.count):
            self._try(message, number)
        if self.kind != "duplicate":
            self.connection.send(honest)

    def _try(self, message: Message, number: int) -> None:
        asked, node = message, self.connection.node
        if self.kind == "spoof":
            target, node = self._victim(message)
            asked = copy.copy(message)
            asked.__dict__["_metadata"] = target
        bad = self.connection.answer(asked, lambda one, _: self._poison(one, number))
        bad.metadata.__dict__["_src_node_id"] = node
        try:
            self.connection.send(bad)
            outcome = "sent"
        except Exception as error:  # noqa: BLE001 - refusals come in many kinds; all are counted
            outcome = type(error).__name__
        with self.told.open("a") as file:
            file.write(f"{outcome}\n")

    def _poison(self, message: Message, number: int) -> Message:
        if self.kind == "replay":
            return Message(self._old, reply_to=message)
        arrays = views(message.content.array_records["arrays"])
        poisoned = {name: values + values.dtype.type(1000 + number) for name, values in arrays.items()}
        return reply(message, poisoned, {}, 10, {"train-loss": float(np.float32(number))})

    def _victim(self, message: Message) -> tuple[Any, int]:
        """Return the metadata of a request of this round to another node, and that node's id."""
        deadline = time.monotonic() + 250  # the requests of a round leave together; its own deadline is 300
        while time.monotonic() < deadline:
            for line in reversed(self.seen.read_text().splitlines()):
                group, number, node = line.split()
                if group == message.metadata.group_id and int(node) != self.connection.node:
                    metadata = copy.deepcopy(message.metadata)
                    metadata.__dict__["_message_id"] = number
                    metadata.__dict__["_dst_node_id"] = int(node)
                    return metadata, int(node)
            time.sleep(0.1)
        raise TimeoutError("no request to another node was seen")
