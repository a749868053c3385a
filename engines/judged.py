"""Flower's grid of a deployment, with replies that are judged before they are put together.

Flower 1.41 has no hook between the announcement of a reply and its arrays in memory: ``HttpGrid.pull_messages`` pulls
and inflates whatever a registered device has sent, and one reply of a few MiB can inflate to any size. So
:class:`JudgedGrid` pulls replies itself, with Flower's own client, and hands them over one by one; everything else is
Flower's grid. Only this file and ``object_client.py`` depend on how ``HttpGrid`` pulls; :data:`CHECKED` names the
versions that they were compared with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedcross.core.allowance import NO_ARRAYS, REFUSED, Allowance, Refusal
from fedcross.core.errors import UploadError
from fedcross.engines.guarded import CHECKED
from fedcross.engines.lost_nodes import LostNodes
from fedcross.engines.object_client import LONGEST_PAUSE_S, PAUSE_S, LostError, NotYetError, ObjectClient, patiently
from fedcross.engines.object_tree import Judge, names_of

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.superlink.grid import HttpGrid

#: Most bytes of replies that one call hands over, unless a single reply is larger.
QUOTA = 1 << 26
#: Seconds that a reply whose first object has come may take for the others. Flower's clients send that object last.
COMPLETE_S = 600.0
#: How often a batch of requests is sent before the run ends, if the SuperLink cannot store it.
PUSHES = 5
#: Metadata of a reply that the SuperLink compares with the request. Those inside the reply are the device's own words.
CHECKED_BY_SUPERLINK = ("run_id", "src_node_id", "dst_node_id", "reply_to_message_id", "message_type")


@dataclass
class _Arrival:
    """A reply that the SuperLink has announced."""

    proto: ProtoMessage
    tree: ObjectTree
    allowance: Allowance
    next: float = 0.0
    pause: float = PAUSE_S
    begun: float | None = None
    incomplete: bool = False  # at the last look

    @property
    def asked(self) -> str:
        return str(self.proto.metadata.reply_to_message_id)


def judged(grid: Grid) -> Grid:
    """Return a :class:`JudgedGrid` around Flower's grid of a deployment; any other grid as it is."""
    module = sys.modules.get("flwr.superlink.grid.http_grid")  # not imported: it is not in use then
    if module is None or not isinstance(grid, module.HttpGrid):
        return grid
    if version("flwr") not in CHECKED:
        log(WARNING, "fedcross: replies are judged as for flwr %s, this is %s", " or ".join(CHECKED), version("flwr"))
    return JudgedGrid(grid)


class JudgedGrid(Grid):
    """A grid that pulls only what was asked for.

    At most one reply is put together at a time, and a device gets no second one before the next call. A reply that is
    not complete keeps nothing in memory meanwhile. So the bytes in flight, per device and in all, are those of one
    reply within its allowance, and :data:`QUOTA` bounds what one call hands over.

    Parameters
    ----------
    inner : HttpGrid
        Flower's grid, connected or not.
    """

    def __init__(self, inner: HttpGrid) -> None:
        self.inner = inner
        self._allowances: dict[str, Allowance] = {}
        self._arrived: list[_Arrival] = []
        self._objects = ObjectClient(inner)
        self._singly = False  # whether replies are asked for one by one
        self._unreadable: list[str] = []  # messages whose reply's announcement cannot be read
        self._lost = LostNodes(self.get_node_ids)

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
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
        """Return what the SuperLink knows of the connected nodes (Flower's ``NodeInfo``)."""
        return patiently(self.inner.get_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; the reply to each may have scalars only, until :meth:`allow` says more.

        If the SuperLink could not store all of them, they are sent again, as new messages. Messages whose time is over
        while the SuperLink is too busy to take them are given up: their ids are empty, and their slots are lost.
        """
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

        batch = list(messages)
        for left in reversed(range(PUSHES)):
            try:
                names = list(patiently(self._pushing(batch)))
                self._lost.sent({name: one.metadata.dst_node_id for name, one in zip(names, batch) if name})
                return names
            except ObjectPushError as error:
                if not left:
                    raise
                log(WARNING, "fedcross: the SuperLink could not store a request, sent again: %s", error)
            time.sleep(LONGEST_PAUSE_S)
            for message in batch:
                message.metadata.__dict__["_created_at"] = time.time()  # part of what a message's id is made of
        return []

    def _pushing(self, batch: Sequence[Message]) -> Callable[[], Iterable[str]]:
        """Return a call that sends `batch`; repeated when the time of all of them is over, it gives them up instead."""
        tried = False

        def push() -> Iterable[str]:
            nonlocal tried
            if tried and batch and all(time.time() > m.metadata.created_at + m.metadata.ttl for m in batch):
                log(WARNING, "fedcross: the SuperLink was busy until the deadline of %s requests: given up", len(batch))
                return [""] * len(batch)
            tried = True
            return self.inner.push_messages(batch)

        return push

    def allow(self, allowances: Mapping[str, Allowance]) -> None:
        """Set what the replies to these messages may consist of: message id -> allowance."""
        self._allowances.update(allowances)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return complete replies to `message_ids`; a refused one as a :class:`core.allowance.Refusal`."""
        waiting = set(message_ids)
        self._announced(waiting)
        bad = Refusal("malformed_message", "the announcement of the reply cannot be read")
        replies = [self._instead(one, self.inner.node.node_id, bad) for one in self._unreadable]
        self._unreadable = []
        handed, served, kept = 0, set(), []
        now = time.monotonic()
        for arrival in self._arrived:
            if arrival.asked not in waiting:
                self._confirm(arrival)
                continue
            node = arrival.proto.metadata.src_node_id
            late = handed > 0 and handed + arrival.allowance.nbytes > QUOTA
            if now < arrival.next or node in served or late:
                kept.append(arrival)
                continue
            reply = self._take(arrival)
            if reply is None:
                kept.append(arrival)
                continue
            replies.append(reply)
            served.add(node)
            handed += arrival.allowance.nbytes
        self._arrived = kept
        here = {arrival.asked for arrival in kept if not arrival.incomplete}
        answered = {reply.metadata.reply_to_message_id for reply in replies} | here
        return replies + [self._gone(one) for one in self._lost.lost(waiting - answered)]

    def _gone(self, asked: str) -> Message:
        """Return an error in the place of a reply whose device is not connected any more, and forget what it sent."""
        why = "the device is not connected any more"
        for arrival in [one for one in self._arrived if one.asked == asked]:
            why += "; it had announced its reply and not sent all of it"
            self._arrived.remove(arrival)
            self._confirm(arrival)
        return self._instead(asked, self.inner.node.node_id, Error(ErrorCode.NODE_UNAVAILABLE, why))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come within `timeout` seconds."""
        waiting = {one for one in self.push_messages(messages) if one}
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and (end is None or time.monotonic() < end):
            found = list(self.pull_messages(waiting))
            replies += found
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            if waiting:
                time.sleep(PAUSE_S)
        return replies

    def close(self) -> None:
        """Close the connection."""
        self.inner.close()

    # ---- one reply ----------------------------------------------------------------------------------------------

    def _announced(self, waiting: set[str]) -> None:
        """Ask the SuperLink for replies; nothing but their names and Flower's metadata comes with them."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        coming = {arrival.asked for arrival in self._arrived}
        asked = waiting - coming
        if not asked:
            return
        for ids in [[one] for one in sorted(asked)] if self._singly else [sorted(asked)]:
            request = PullAppMessagesRequest(message_ids=ids)
            try:
                found = patiently(partial(self._objects.client.PullMessages, request))
            except ValueError as error:  # a device can nest a tree so deep that nobody reads the answer
                log(WARNING, "fedcross: the announcement of %s replies is not readable: %s", len(ids), error)
                if len(ids) == 1:
                    self._unreadable += ids
                self._singly = True  # what was announced with it is lost, once
                continue
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                number = proto.metadata.reply_to_message_id
                self._arrived.append(_Arrival(proto, tree, self._allowances.pop(number, NO_ARRAYS)))

    def _take(self, arrival: _Arrival) -> Message | None:
        """Return the reply, an error in its place, or None if it is not complete yet."""
        meta = arrival.proto.metadata
        try:
            judge = Judge(arrival.allowance, names_of(arrival.tree, arrival.allowance), self._objects.pull)
            try:
                if arrival.tree.object_id != meta.message_id:
                    raise UploadError("malformed_message", "the reply's tree is that of another message")
                judge.judge(meta.message_id)
            except NotYetError:
                self._later(arrival, begun=bool(judge.contents))
                return None
            message = self._inflated(arrival, judge.contents)
        except UploadError as error:
            self._confirm(arrival)
            return self._instead(arrival.asked, meta.src_node_id, Refusal(error.reason, str(error).partition(": ")[2]))
        except LostError:
            self._confirm(arrival)
            lost = "objects of the reply are gone: not sent in time, or more than the SuperLink takes (its log says so)"
            return self._instead(arrival.asked, self.inner.node.node_id, Error(ErrorCode.MESSAGE_UNAVAILABLE, lost))
        self._confirm(arrival)
        if _code(message) == REFUSED:  # the SuperLink lets no device announce it
            why = f"by the SuperLink: {str(message.error.reason)[:600]}"
            return self._instead(arrival.asked, meta.src_node_id, Refusal("refused", why))
        return message

    def _later(self, arrival: _Arrival, *, begun: bool) -> None:
        """Look at the reply again after a pause; refuse it if it takes too long."""
        now, arrival.incomplete = time.monotonic(), True
        if begun and arrival.begun is None:
            arrival.begun = now
        if arrival.begun is not None and now - arrival.begun > COMPLETE_S:
            raise UploadError("incomplete", f"not all objects of the reply came within {COMPLETE_S:.0f} s")
        arrival.next, arrival.pause = now + arrival.pause, min(2 * arrival.pause, LONGEST_PAUSE_S)

    def _inflated(self, arrival: _Arrival, contents: dict[str, bytes]) -> Message:
        """Put the reply together; its own metadata must be what the SuperLink checked."""
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        told = arrival.proto.metadata
        try:
            message = inflate_object_from_contents(told.message_id, contents)
            if not isinstance(message, Message):
                raise UploadError("malformed_message", "the reply is no message")
            own = message.metadata
            names = CHECKED_BY_SUPERLINK if told.src_node_id != self.inner.node.node_id else ()  # else its own words
            pairs = [(getattr(own, name), getattr(told, name)) for name in names]
            pairs.append((_code(message), _code(arrival.proto)))
        except UploadError:
            raise
        except Exception as error:
            # Flower's classes trust what they read; a device can make them raise anything.
            raise UploadError("malformed_message", f"not readable, {type(error).__name__}") from error
        if any(inside != outside for inside, outside in pairs):
            raise UploadError("malformed_message", "metadata or error in the reply are not those it was sent under")
        message.metadata.__dict__["_message_id"] = told.message_id
        return message

    def _instead(self, asked: str, sender: int, error: Error) -> Message:
        """Return an error in the place of the reply to the message `asked`."""
        from flwr.app.message import make_message
        from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE

        server = self.inner.node.node_id
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=sender,
            dst_node_id=server,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=asked,
            created_at=time.time(),
        )
        return make_message(metadata=metadata, error=error)

    def _confirm(self, arrival: _Arrival) -> None:
        """Let the SuperLink delete the reply's objects."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        request = ConfirmMessageReceivedRequest(
            node=self.inner.node, run_id=self.run.run_id, message_object_id=arrival.proto.metadata.message_id
        )
        patiently(lambda: self._objects.client.ConfirmMessageReceived(request))


def _code(message: Message | ProtoMessage) -> int | None:
    """Return the code of the message's error, None if it has none."""
    failed = message.has_error() if isinstance(message, Message) else message.HasField("error")
    return message.error.code if failed else None
