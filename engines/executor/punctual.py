"""Closes connections on which no complete head of a request comes: Uvicorn waits for the first one without an end.

A head has :data:`HEAD_S` seconds and :data:`LONGEST` bytes. Of the connections that wait for one, the oldest is closed
when there are more than :data:`MOST`: who has something to ask does so at once, and who only holds connections loses
them. A TLS handshake has :data:`HANDSHAKE_S` seconds, where Python's own minute is (:func:`loop`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
LONGEST = 65536
HANDSHAKE_S = 10.0
MOST = 256


class Waiting:
    """The connections that wait for a request's head, the oldest first."""

    def __init__(self, most: int = MOST, seconds: float = HEAD_S) -> None:
        self._most, self._seconds = most, seconds
        self._here: dict[Any, asyncio.TimerHandle] = {}

    def __contains__(self, one: object) -> bool:
        return one in self._here

    def __len__(self) -> int:
        return len(self._here)

    def come(self, one: Any, later: Callable[..., asyncio.TimerHandle]) -> None:
        """Let a connection wait; `later` is its event loop's ``call_later``."""
        if one in self._here:
            return
        while len(self._here) >= self._most:
            self.end(next(iter(self._here)))
        self._here[one] = later(self._seconds, self.end, one)

    def go(self, one: Any) -> None:
        """Its head is here, or the connection is gone."""
        if (timer := self._here.pop(one, None)) is not None:
            timer.cancel()

    def end(self, one: Any) -> None:
        """Close a connection, whatever the other side says to it."""
        self.go(one)
        one.transport.abort()


waiting = Waiting()


def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that Uvicorn would take, whose servers end a TLS handshake that does not come."""
    try:
        import uvloop
    except ImportError:
        new: Any = asyncio.new_event_loop()
    else:
        new = uvloop.new_event_loop()
    create = new.create_server

    @functools.wraps(create)
    async def create_server(*arguments: Any, **named: Any) -> Any:
        limit = {"ssl_handshake_timeout": HANDSHAKE_S} if named.get("ssl") else {}
        return await create(*arguments, **limit, **named)

    new.create_server = create_server
    return new  # type: ignore[no-any-return]


class Punctual(HttpToolsProtocol):
    """Uvicorn's connection with a deadline for each head."""

    _head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._head = 0
        waiting.come(self, self.loop.call_later)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        waiting.go(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what has come; close the connection when a head has no end."""
        if self in waiting and self._head > LONGEST:
            waiting.end(self)
            return
        self._head += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin to wait for the next request's head."""
        super().on_message_begin()
        self._head = 0
        waiting.come(self, self.loop.call_later)

    def on_headers_complete(self) -> None:
        """Let the request through."""
        waiting.go(self)
        super().on_headers_complete()
