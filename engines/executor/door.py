"""The door of the SuperLink: who may bring a request to Flower's application, and when.

To refuse a call Flower needs nearly as long as to answer it: it reads the request, takes a thread, checks the signature
and asks its database. So whoever calls too often is answered here, from the headers alone, in a small part of a
millisecond; :mod:`fair` decides it. All calls of a node count, objects and a run's program too, by the time they take.

Whose call it is says the public key in its header, which anybody may write there. So a key counts as its node's only
where it has been proved: once a signed call has come through Flower's own check, the door knows that key *at that
address*. A call with a key that is not known at its address counts for the strangers of that address. A call with a
known key that Flower refuses counts for them as well, and for a minute the door itself checks the signatures of calls
with that key from there: nobody else's call costs a device anything, not even that of a neighbour behind one router.

The address is the one that the gateway names (:mod:`entry`), IPv6 by its first half.
"""

from __future__ import annotations

import asyncio
import binascii
import functools
import ipaddress
import json
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from starlette.middleware import Middleware

from .fair import AWAY, QUEUE_S, Call, Caller, Fair, current
from .replies import AGAIN_S, Later
from .share import NOBODY, node_of
from .turns import LARGE

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

FLEET = "/v1/fleet/"
KEY, SIGNATURE, TIME = (
    name.encode() for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
)
READ = frozenset({KEY, SIGNATURE, TIME, b"content-length"})
#: Longest header with a public key; Flower's have some 300 bytes.
LONGEST = 1024
#: Seconds for which the door checks signatures itself after a call with a known key was refused.
DOUBT_S = 60.0
#: Bytes of a body that a stranger may bring, and how many of them may bring more at a time: a device that sends an
#: object when the SuperLink has just been started.
SMALL, MORE = 16384, 4
#: Seconds for a body, and for a stranger's.
BODY_S, STRANGERS_BODY_S = 120.0, 10.0
#: Addresses at which a node is known, and all pairs of key and address that are remembered.
ADDRESSES, REMEMBERED = 256, 20_000
UNAUTHORIZED, TOO_LATE = 401, 503
#: The words with which Flower refuses a signature.
WRONG = "Invalid SuperNode authentication"


@dataclass
class Pair:
    """A key at an address: its node, and until when it is in doubt who uses it."""

    node: int
    doubt: float = 0.0


@functools.lru_cache(4096)
def network(address: str) -> str:
    """Return what counts as one address: IPv4 as it is, of IPv6 the first 64 bits, as at the gateway."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address


def key_in(headers: dict[bytes, bytes]) -> bytes:
    """Return the public key in the headers, which can be written there in several ways; empty if it is none."""
    text = headers.get(KEY, b"")
    try:
        return b64decode(text, validate=True) if len(text) <= LONGEST else b""
    except binascii.Error:
        return b""


def usable(key: bytes) -> bool:
    """Return whether a signature can be checked with this public key; at one of another kind Flower fails."""
    try:
        return isinstance(bytes_to_public_key(key), EllipticCurvePublicKey)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False


def signed(headers: dict[bytes, bytes]) -> bool:
    """Return whether the time in the headers is signed with the key in the headers."""
    try:
        key = bytes_to_public_key(b64decode(headers[KEY], validate=True))
        return verify_signature(key, headers[TIME], b64decode(headers[SIGNATURE], validate=True))
    except (KeyError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm, binascii.Error):
        return False


class Pairs:
    """The keys that are known at an address."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[bytes, str], Pair] = {}
        self._of: dict[int, list[tuple[bytes, str]]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def find(self, key: bytes, address: str) -> Pair | None:
        """Return the pair, None if this key is not known there."""
        return self._pairs.get((key, address))

    def add(self, key: bytes, address: str, node: int) -> None:
        """Remember a key that was proved; of a node's addresses, and of all, the oldest are forgotten."""
        pair = (key, address)
        if pair in self._pairs and self._pairs[pair].node == node:
            return
        self.remove(key, address)
        own = self._of.setdefault(node, [])
        if len(own) >= ADDRESSES:
            self.remove(*own[0])
        elif len(self._pairs) >= REMEMBERED:
            self.remove(*next(iter(self._pairs)))
        self._pairs[pair] = Pair(node)
        self._of.setdefault(node, []).append(pair)

    def remove(self, key: bytes, address: str) -> None:
        """Forget a pair."""
        found = self._pairs.pop((key, address), None)
        if found is not None:
            own = self._of[found.node]
            own.remove((key, address))
            if not own:
                del self._of[found.node]


class Door:
    """An ASGI application before Flower's.

    Parameters
    ----------
    app : callable
        Flower's.
    fair : Fair
        Who is next.
    """

    def __init__(self, app: Application, fair: Fair) -> None:
        self._app, self._fair, self.pairs = app, fair, Pairs()
        self._more = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it to Flower when its place is free."""
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self._app(scope, receive, send)
            return
        self._fair.later = asyncio.get_running_loop().call_later
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in READ:
                headers.setdefault(name, value)  # of several, Flower reads the first
        key, address = key_in(headers), network((scope.get("client") or ("",))[0])
        pair = self.pairs.find(key, address)
        doubt = pair is not None and pair.doubt > self._fair.clock()
        sure = doubt and signed(headers)
        if (doubt and not sure) or (pair is None and not usable(key)):
            await answer(send, UNAUTHORIZED, WRONG)
            return
        caller = self._fair.strangers(address) if pair is None else self._fair.node(pair.node)
        try:
            call = self._fair.come(caller, scope["path"])
        except Later as later:
            await answer(send, TOO_LATE, later.detail)
            return
        try:
            body = await self._body(call, headers, receive)
            if body is None:
                await answer(send, TOO_LATE, "The request did not come in time.")
                return
            call.large = len(body) >= LARGE
            if not await self._placed(call):
                await answer(send, TOO_LATE, "The SuperLink is busy.")
                return
            await self._inside(call, key, address, sure, (scope, body, receive, send))
        finally:
            self._fair.go(call)

    async def _body(self, call: Call, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the whole body; None if it does not come in time, or there is no room for it."""
        length = headers.get(b"content-length", b"")
        more = not call.caller.known and not (length.isdigit() and int(length) <= SMALL)
        if more and self._more >= MORE:
            return None
        self._more += more
        try:
            async with asyncio.timeout(BODY_S if call.caller.known else STRANGERS_BODY_S):
                return await whole(receive)
        except TimeoutError:
            return None
        finally:
            self._more -= more

    async def _placed(self, call: Call) -> bool:
        """Wait for the call's place; return whether it has come."""
        place = asyncio.get_running_loop().create_future()
        call.admitted = functools.partial(place.set_result, None)
        self._fair.wait(call)
        if not place.done():
            await asyncio.wait([place], timeout=QUEUE_S)
        return place.done()

    async def _inside(
        self, call: Call, key: bytes, address: str, sure: bool, request: tuple[Message, bytes, Receive, Send]
    ) -> None:
        """Have Flower answer the call; then it is known who made it."""
        scope, body, receive, send = request
        bodies, left = [body], False

        async def replay() -> Message:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

        async def leave(message: Message) -> None:
            nonlocal left
            if not left:
                left = True
                self._settle(call, key, address, sure, message.get("status", 0))
                self._fair.leave(call)  # the answer may go over a slow line
            await send(message)

        current.set(call)
        await self._app(scope, replay, leave)

    def _settle(self, call: Call, key: bytes, address: str, sure: bool, status: int) -> None:
        """Note who made the call, and make that caller pay for it."""
        fair, now = self._fair, self._fair.clock()
        if call.node is not None:
            caller: Caller = fair.node(call.node)
            if key:
                self.pairs.add(key, address, call.node)
            if call.away:
                caller.away[call.path] = now + call.away
        elif sure and status != UNAUTHORIZED:
            return
        elif sure:  # the key is registered no more, or the clock is wrong
            self.pairs.remove(key, address)
            return
        else:
            caller = fair.strangers(address)
            if (pair := self.pairs.find(key, address)) is not None:
                pair.doubt = now + DOUBT_S
        if caller is not call.caller:
            fair.move(call, caller)


async def whole(receive: Receive) -> bytes | None:
    """Return a request's body; None if its sender has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def answer(send: Send, status: int, why: str) -> None:
    """Answer a request at the door; it gets no line in the web server's log."""
    current.set(AWAY)
    body = json.dumps({"detail": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == TOO_LATE:
        headers.append((b"retry-after", str(AGAIN_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def proved(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler of a node's call, which tells the door whose it is: its signature has been checked."""

    @functools.wraps(handler)
    def call(request: Any, state: Any, **others: Any) -> Any:
        here, node = current.get(), node_of(request, state)
        if here is not None and node != NOBODY:
            here.node = node
        try:
            return handler(request=request, state=state, **others)
        except Later as later:
            if here is not None:
                here.away = later.seconds
            raise

    return call


def before(middleware: Callable[[], tuple[Middleware, ...]], fair: Fair) -> Callable[[], tuple[Middleware, ...]]:
    """Return Flower's list of what stands before its application, with the door as the first."""

    @functools.wraps(middleware)
    def found() -> tuple[Middleware, ...]:
        return (Middleware(Door, fair=fair), *middleware())

    return found
