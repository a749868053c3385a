"""Flower's grid of a deployment: calls are repeated while the SuperLink is busy, lost requests are reported."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from logging import WARNING
from typing import Any, TypeVar

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

T = TypeVar("T")
#: Seconds for which a call is repeated while the SuperLink answers with an error of its own, or does not answer.
BUSY_S, PAUSE_S = 300.0, 1.0
#: Seconds between two looks at the list of nodes, and how long a node may be missing before its requests are lost.
LOOK_S, AWAY_S = 5.0, 30.0


def network_grid(grid: Grid) -> Grid:
    """Return Flower's grid of a deployment as a :class:`NetworkGrid`; any other grid as it is."""
    return NetworkGrid(grid) if type(grid).__name__ == "HttpGrid" else grid


def patiently(call: Callable[[], T]) -> T:
    """Return ``call()``; repeat it for up to :data:`BUSY_S` seconds while the SuperLink is busy or away."""
    import httpx

    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return call()
        except (httpx.HTTPStatusError, httpx.TransportError) as error:
            refused = isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error
            if refused or time.monotonic() > deadline:
                raise
            log(WARNING, "fedcross: the SuperLink does not answer (%s); trying again", error)
        time.sleep(PAUSE_S)


@dataclass
class _Sent:
    """An open request: its message without content, when it was sent (seconds since 1970), whether Flower lost it."""

    message: Message
    at: float
    lost: bool = False


class NetworkGrid(Grid):
    """Flower's grid, with an error reply for each request that no device will answer.

    A request is lost if its device has restarted since (``MESSAGE_UNAVAILABLE``: it can be sent again), or has not been
    connected for :data:`AWAY_S` seconds (``NODE_UNAVAILABLE``). Flower up to 1.42 reports some of these, 1.43 none.

    Parameters
    ----------
    inner : Grid
        Flower's.
    """

    def __init__(self, inner: Grid) -> None:
        self.inner = inner
        self._open: dict[str, _Sent] = {}
        self._gone: dict[str, Message] = {}
        self._seen: dict[int, float] = {}  # node -> when it was last connected
        self._looked = time.monotonic()

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self.inner.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self.inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message (part of Flower's interface for older apps)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""
        return patiently(self.inner.get_node_ids)

    def get_nodes(self) -> Iterable[Any]:
        """Return Flower's ``NodeInfo`` of the connected nodes."""
        return patiently(self.inner.get_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids; an empty id is a message that the SuperLink did not take.

        Messages whose arrays it did not take, because it restarted after their heads, are lost requests.
        """
        batch, lost = list(messages), False
        try:
            ids = [one or "" for one in patiently(lambda: self.inner.push_messages(batch))]
        except Exception as error:
            if type(error).__name__ != "ObjectPushError":  # a private class of Flower's
                raise
            log(WARNING, "fedcross: the SuperLink did not take the arrays of a message (%s); sending it again", error)
            ids, lost = [message.metadata.message_id for message in batch], True
        for message_id, message in zip(ids, batch):
            if message_id:
                bare = copy.copy(message)
                bare.content = RecordDict()  # a model is not kept
                self._open[message_id] = _Sent(bare, time.time(), lost)
        return ids

    def forget(self, message_ids: Iterable[str]) -> None:
        """Ask for these messages no more: their slots have ended."""
        for one in message_ids:
            self._open.pop(one, None)
            self._gone.pop(one, None)

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> list[Message]:
        """Return the replies that have arrived, and an error reply for each request that is lost."""
        asked = {*(message_ids or ()), *(reply_to_message_ids or ())}
        known = {one for one in asked if one not in self._gone and not (one in self._open and self._open[one].lost)}
        replies = list(patiently(lambda: self.inner.pull_messages(known))) if known else []
        for reply in [reply for reply in replies if _unavailable(reply)]:  # the device may come back
            if reply.metadata.reply_to_message_id in self._open:
                self._open[reply.metadata.reply_to_message_id].lost = True
                replies.remove(reply)
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        for one in answered:
            self._open.pop(one, None)
        return replies + self._lost(asked - answered)

    def _lost(self, waiting: Collection[str]) -> list[Message]:
        """Return error replies for those of `waiting` that are lost, each once; mostly without asking the SuperLink."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            nodes = {int(node.node_id): node for node in self.get_nodes()}
            self._seen |= dict.fromkeys(nodes, now)
            for one, sent in list(self._open.items()):
                self._judge(one, sent, nodes.get(sent.message.metadata.dst_node_id), now)
        found = [one for one in waiting if one in self._gone]
        return [self._gone.pop(one) for one in found]

    def _judge(self, message_id: str, sent: _Sent, node: Any, now: float) -> None:
        """Move a lost request from the open ones to the lost ones."""
        target = sent.message.metadata.dst_node_id
        if node is None and now - self._seen.setdefault(target, now) >= AWAY_S:
            error = Error(ErrorCode.NODE_UNAVAILABLE, "the device is not connected any more")
        elif node is not None and (sent.lost or _activated(node) > sent.at):
            error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "the device has started anew since the request was sent")
        else:
            return
        sent.message.metadata.__dict__["_message_id"] = message_id
        self._gone[message_id] = Message(error, reply_to=sent.message)
        del self._open[message_id]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come within `timeout` seconds, as Flower's grid does."""
        return self.inner.send_and_receive(messages, timeout=timeout)


def _unavailable(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE


def _activated(node: Any) -> float:
    """Return when a node was last activated, in seconds since 1970; 0 if the SuperLink does not say it."""
    text = getattr(node, "last_activated_at", "")
    return datetime.fromisoformat(text).timestamp() if text else 0.0
