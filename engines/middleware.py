"""The ASGI middleware in front of Flower's SuperLink: operator's token, limit on object trees, long polling.

- Calls of the Control API need the operator's token in the header :data:`HEADER`.
- A reply's announced tree of objects is checked before Flower stores it. Flower resolves shared children again and
  again: a tree of a few KiB locks its database for minutes.
- ``pull-messages`` without a message is answered when the server has sent something, or after :data:`HOLD_S`.
- Paths that are not listed here do not exist. So a version of Flower with other paths is refused, not let through.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.common.logger import log

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADER = "fedcross-operator"
CONTROL, RUNTIME, FLEET = "/v1/control/", "/v1/runtime/", "/v1/fleet/"
PULL, ANNOUNCE = FLEET + "pull-messages", FLEET + "push-messages"
#: Calls of SuperNodes that Flower 1.42 and 1.43 have.
_CALLS = (
    "register-node activate-node deactivate-node unregister-node send-node-heartbeat pull-messages push-messages "
    "get-run get-fab push-object pull-object confirm-message-received"
)
FLEET_PATHS = frozenset(FLEET + name for name in _CALLS.split())
SENDS = frozenset({RUNTIME + "push-messages", RUNTIME + "push-object"})
REPLIES, COLLECT = frozenset({ANNOUNCE, FLEET + "push-object"}), RUNTIME + "pull-messages"
#: Message, table of records, record, array, chunk.
DEPTH = 5
#: Most objects of a reply, bytes of an announcement, and names whose children are remembered.
OBJECTS = 20_000
ANNOUNCED = 4 << 20
REMEMBERED = 200_000
#: Seconds for which a call for messages waits; Flower's client waits 30 s for an answer.
HOLD_S = 12.0
#: Seconds without a further object after which messages count as complete, and the longest wait for that.
SETTLE_S, MOST_SETTLE_S = 0.04, 0.5
_NAME = re.compile(r"[0-9a-f]{64}")
REQUEST = "flwr.proto.PushMessagesRequest"


@dataclass
class RefusedError(Exception):
    """A call that Flower does not get, with its HTTP status."""

    status: int
    why: str


class Kept(list[Event]):
    """An answer of Flower's application that is kept for now."""

    async def __call__(self, event: Event) -> None:
        """Keep one event (ASGI's ``send``)."""
        self.append(event)


class Trees:
    """Checks announced trees: equal names must have equal children, in one announcement and from one to the next.

    Raises RuntimeError if the installed Flower announces replies in a way that this class does not know.
    """

    def __init__(self) -> None:
        from google.protobuf import descriptor_pool, message_factory

        try:
            announced = descriptor_pool.Default().FindMessageTypeByName(REQUEST)
            trees = announced.fields_by_name["message_object_trees"].message_type
            if trees is None:
                raise KeyError("object trees")
            known = set(trees.fields_by_name) == {"object_id", "children"}
            fleet = announced.file.message_types_by_name.items()
            holders = {name for name, m in fleet if trees in [field.message_type for field in m.fields]}
        except KeyError as error:
            raise RuntimeError(f"this Flower has no {error}") from error
        if not known or {name for name in holders if name.endswith("Request")} != {announced.name}:
            raise RuntimeError(f"this Flower announces objects in another way ({holders})")
        self._request: Any = message_factory.GetMessageClass(announced)
        self._children: OrderedDict[str, frozenset[str]] = OrderedDict()

    def check(self, body: bytes) -> None:
        """Raise RefusedError for an announcement that is not one message with one tree of a reply's size and shape."""
        try:
            request = self._request.FromString(body)
        except Exception as error:
            raise RefusedError(400, "an announcement that cannot be read") from error
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RefusedError(400, "not one message with one tree")
        tree = request.message_object_trees[0]
        if request.messages_list[0].metadata.message_id != tree.object_id:
            raise RefusedError(400, "message and tree have different names")
        found = self._read(tree)
        for name, children in found.items():
            if self._children.get(name, children) != children:
                raise RefusedError(400, "an object has other children than before")
        self._children.update(found)
        while len(self._children) > REMEMBERED:
            self._children.popitem(last=False)

    def _read(self, tree: Any) -> dict[str, frozenset[str]]:
        """Return name -> children of all objects of `tree`; look at :data:`OBJECTS` of them at most."""
        found: dict[str, frozenset[str]] = {}
        level, seen = [tree], 1
        for _ in range(DEPTH):
            seen += sum(len(node.children) for node in level)
            if seen > OBJECTS:
                raise RefusedError(413, f"more than {OBJECTS} objects")
            for node in level:
                children = frozenset(child.object_id for child in node.children)
                if not _NAME.fullmatch(node.object_id):
                    raise RefusedError(400, "an object's name is no SHA-256")
                if len(children) != len(node.children):
                    raise RefusedError(400, "an object names a child twice")
                if found.setdefault(node.object_id, children) != children:
                    raise RefusedError(400, "an object has two sets of children")
            level = [child for node in level for child in node.children]
            if not level:
                return found
        raise RefusedError(400, f"objects nested more than {DEPTH} deep")


class Guard:
    """Flower's `application`, made by its own factory, behind the rules of this module; `token` is the operator's."""

    def __init__(self, application: Application, token: str) -> None:
        self._application, self._token = application, token.encode()
        self._trees = Trees()
        self._sent = asyncio.Event()
        self._last = self._last_reply = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":  # Flower has no WebSockets
            return await send({"type": "websocket.close", "code": 1008})
        path = scope["path"]
        try:
            self._check_path(path, scope)
            body = await _body(receive, ANNOUNCED) if path in (ANNOUNCE, PULL) else b""
            if path == ANNOUNCE:
                self._trees.check(body)
                receive = _replay(body, receive)
        except RefusedError as error:
            log(WARNING, "fedcross: refused %s of %s: %s", path[:80], _caller(scope), error.why)
            return await _answer(send, error)
        if path == PULL:
            return await self._hold(scope, body, receive, send)
        if path == COLLECT:
            await _settled(lambda: self._last_reply)
        await self._application(scope, receive, send)
        if path in REPLIES:
            self._last_reply = time.monotonic()
        if path in SENDS:
            self._last = time.monotonic()
            self._sent.set()
            self._sent = asyncio.Event()
        return None

    def _check_path(self, path: str, scope: Scope) -> None:
        if path.startswith(CONTROL):
            if not hmac.compare_digest(_header(scope, HEADER), self._token):
                raise RefusedError(401, "the Control API takes calls with the operator's token only")
        elif path not in FLEET_PATHS and not path.startswith(RUNTIME) and path.rstrip("/") != "/health":
            raise RefusedError(404, "no such path")

    async def _hold(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a call for messages: with a message, or empty at the end of :data:`HOLD_S`, or never if it is cut."""
        gone = asyncio.ensure_future(receive())  # ends when the device closes the connection
        end = time.monotonic() + HOLD_S
        try:
            while True:
                sent, events = self._sent, Kept()

                await self._application(dict(scope), _replay(body, lambda: asyncio.shield(gone)), events)
                empty = events[0].get("status") == 200 and not any(event.get("body") for event in events)
                left = end - time.monotonic()
                if not empty or left <= 0:
                    for event in events:
                        await send(event)
                    return
                waiting = asyncio.ensure_future(sent.wait())
                await asyncio.wait({waiting, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    return
                await _settled(lambda: self._last)
        finally:
            gone.cancel()


async def _settled(last: Callable[[], float]) -> None:
    """Wait until the time `last` is :data:`SETTLE_S` ago, but no longer than :data:`MOST_SETTLE_S`."""
    end = time.monotonic() + MOST_SETTLE_S
    while (left := last() + SETTLE_S - (now := time.monotonic())) > 0 and now < end:
        await asyncio.sleep(left)


def _header(scope: Scope, name: str) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name.encode()), b"")


def _caller(scope: Scope) -> str:
    key = hashlib.sha256(_header(scope, "flwr-public-key")).hexdigest()[:16]
    return f"{(scope.get('client') or ['?'])[0]} (key {key})"


async def _body(receive: Receive, most: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise RefusedError(400, "the connection was closed")
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise RefusedError(413, f"a body of more than {most} bytes")
        more = event.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Callable[[], Awaitable[Event]]) -> Receive:
    """Return a ``receive`` that gives `body` first."""
    first: list[Event] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Event:
        return first.pop() if first else await receive()

    return again


async def _answer(send: Send, error: RefusedError) -> None:
    body = json.dumps({"detail": error.why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
