"""Which messages the SuperLink takes from a device; :mod:`announced` asks before one is stored.

Flower checks that a caller has the key of the node that it says it is (``request.node``), and little of the message
that it brings. So a registered device can store requests for other devices in the server's name, times that are no
numbers: SQLite keeps them as NULL, and the server's next question for replies fails.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import Counter
from collections.abc import Callable
from logging import WARNING
from typing import Any

from fastapi import HTTPException
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.logger import log
from sqlalchemy.exc import OperationalError

from .instead import REFUSED, asked_for

#: Seconds by which the time in a reply may lie outside what its request and the SuperLink's clock allow. Flower itself
#: refuses a device whose clock is 15 s off.
CLOCK_S = 60.0
#: Longest life of a reply and longest work of a ClientApp that are believed, in seconds.
LONGEST_S = 10 * 365 * 86400.0
#: Longest pause between two heartbeats, in seconds. Flower's SuperNode says 30; it takes up to 1800, and counts a
#: device as online for twice the pause.
HEARTBEAT_S = 120.0
#: Codes of errors that only the SuperLink or the server's grid makes: "refused", and Flower's three for what could
#: not be delivered.
NOT_A_DEVICES = frozenset(
    {REFUSED, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE}
)
#: What a device may name things with; all that Flower and fedcross make up is of this kind.
PLAIN = re.compile(r"[ -~]{0,128}")
#: Longest public key, in bytes.
KEY = 1024
#: Seconds after which a device should ask again.
AGAIN_S = 5


def wrong(request: Any, state: Any, now: float) -> str | None:
    """Return why the pushed message is no reply that the calling node may send, else None.

    Parameters
    ----------
    request : PushMessagesRequest
        With one message; Flower has checked that the caller has the key of ``request.node``.
    state : LinkState
        The SuperLink's.
    now : float
        Seconds since 1970.
    """
    [message] = request.messages_list
    told = message.metadata
    if not told.reply_to_message_id:
        return "a request and not a reply"
    if not PLAIN.fullmatch(told.reply_to_message_id) or not PLAIN.fullmatch(told.group_id):
        return "the name of its request, or of its group, is none"
    if told.src_node_id != request.node.node_id:
        return f"it says that node {told.src_node_id} sent it"
    if told.dst_node_id != SUPERLINK_NODE_ID:
        return f"it is for node {told.dst_node_id} and not for the server"
    if why := _unreadable(message, request.clientapp_runtime_list):
        return why
    if not told.created_at <= now + CLOCK_S:  # also if it is no number
        return f"it was made at {told.created_at}, {told.created_at - now:.0f} s from now"
    asked = asked_for(state, told.reply_to_message_id)
    if asked is None:  # Flower stores nothing then; honest replies may be late
        return None if state.get_run_info(run_ids=[told.run_id]) else f"there is no run {told.run_id}"
    if asked.node != request.node.node_id:
        return f"it answers a request to node {asked.node}"
    if asked.run != told.run_id:
        return f"it says run {told.run_id} and answers a request of run {asked.run}"
    if told.created_at < asked.created_at - CLOCK_S:
        return "it was made before its request"
    return None


def _unreadable(message: Any, runtimes: Any) -> str | None:
    """Return what Flower could not read or store, else None."""
    from flwr.common.serde_utils import metadata_from_proto

    told = message.metadata
    try:
        metadata_from_proto(told)
    except ValueError:
        return f"no type of message: {told.message_type[:40]!r}"
    if message.HasField("content") == message.HasField("error"):
        return "neither content nor error, or both"
    if message.error.code in NOT_A_DEVICES:
        return f"an error with code {message.error.code} is the SuperLink's to send"
    if not abs(told.ttl) <= LONGEST_S:
        return f"it lives for {told.ttl} s"
    if len(runtimes) > 1 or not all(0 <= seconds <= LONGEST_S for seconds in runtimes):
        return f"the work took {', '.join(map(str, runtimes[:3]))} s"
    return None if math.isfinite(told.created_at) else f"it was made at {told.created_at}"


def places(tree: Any) -> int:
    """Return how many objects an announced tree names."""
    seen, level = 0, [tree]
    while level:
        seen += len(level)
        level = [child for node in level for child in node.children]
    return seen


class Later(HTTPException):
    """The device should ask again (status 503, which Flower's SuperNode repeats).

    Parameters
    ----------
    why : str
        The reason.
    seconds : float
        For how long further calls of this kind have no better prospects: :mod:`door` sends them away.
    """

    def __init__(self, why: str, seconds: float = 0.0) -> None:
        super().__init__(503, f"{why}.", {"Retry-After": str(AGAIN_S)})
        self.why, self.seconds = why, seconds


class Refused(HTTPException):
    """A message or object that the SuperLink does not take, however often it is sent."""

    def __init__(self, status: int, why: str, what: str = "This reply") -> None:
        super().__init__(status, f"{what} is refused: {why}.")
        self.why = why


def tell(how: Callable[[Any, str, int, str], bool], state: Any, name: str, node: int, why: str) -> None:
    """Tell the server that a reply is refused, by :func:`instead.report` or :func:`instead.replace`.

    Raises
    ------
    Later
        If the database is busy: the device sends the reply again and is refused again.
    """
    try:
        how(state, name, node, why)
    except (OperationalError, RuntimeError) as error:
        raise Later("the refusal of a reply cannot be stored now") from error


class Refusals:
    """Counts what was refused and says it in the log, with the node: the first ones, then less and less often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: Counter[int] = Counter()

    def __call__(self, node: int, what: str, why: str) -> None:
        """Note that `what` of `node` was refused, and why."""
        with self._lock:
            self._count[node] += 1
            own, total = self._count[node], self._count.total()
        if own <= 8 or own & (own - 1) == 0:
            log(WARNING, "fedcross: refused %s of node %s: %s (%s of it, %s in all)", what, node, why, own, total)


def steady(handler: Callable[..., Any], refused: Refusals) -> Callable[..., Any]:
    """Return Flower's handler of heartbeats or activations, which refuses pauses above :data:`HEARTBEAT_S`."""

    @functools.wraps(handler)
    def call(request: Any, state: Any) -> Any:
        if len(getattr(request, "public_key", b"")) > KEY:  # Flower logs it
            raise HTTPException(400, f"A public key has {KEY} bytes at most.")
        if not request.heartbeat_interval <= HEARTBEAT_S:
            known = hasattr(request, "node")
            node = request.node.node_id if known else state.get_node_id_by_public_key(request.public_key)
            why = f"{request.heartbeat_interval} s between two heartbeats"
            refused(node, "a heartbeat", why)
            raise HTTPException(400, f"{why}: {HEARTBEAT_S:.0f} s at most.")
        return handler(request=request, state=state)

    return call


def plain(handler: Callable[..., Any], refused: Refusals, *names: str) -> Callable[..., Any]:
    """Return Flower's handler, which refuses a request whose fields `names` are not :data:`PLAIN`: Flower logs them.

    A request that names a run that does not exist gets status 404; Flower answers 500, which devices repeat.
    """

    @functools.wraps(handler)
    def call(request: Any, state: Any, **others: Any) -> Any:
        for name in names:
            if not PLAIN.fullmatch(text := getattr(request, name)):
                why = f"{name} of {len(text)} characters is no name"
                refused(request.node.node_id, "a request", why)
                raise HTTPException(400, f"{why}.")
        try:
            return handler(request=request, state=state, **others)
        except KeyError as error:  # Flower looks the run up without asking whether there is one
            if state.get_run_info(run_ids=[request.run_id]):
                raise
            why = f"there is no run {request.run_id}"
            refused(request.node.node_id, "a request", why)
            raise HTTPException(404, f"{why}.") from error

    return call
