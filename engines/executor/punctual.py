"""Closes connections on which no complete head of a request comes: Uvicorn waits for the first one without an end.

A head has :data:`HEAD_S` seconds and :data:`LONGEST` bytes. Of the connections that wait for one, the oldest is closed
when there are more than :data:`MOST`: who has something to ask does so at once, and who only holds connections loses
them. The same for connections whose TLS handshake does not come (:class:`Doorway`).
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
LONGEST = 65536
HANDSHAKE_S = 10.0
#: Requests that may wait on a connection for the answer to the first.
AHEAD = 4
#: Seconds in which the answer to a call that is not read may still go out.
LINGER_S = 1.0
#: Connections that are taken before the event loop does something else.
AT_ONCE = 50
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


class Doorway:
    """A server with TLS that takes connections itself, and so knows how many are in their handshake.

    Of more than `most` the oldest is closed, and each when its handshake takes longer than :data:`HANDSHAKE_S` seconds:
    idle connections take neither all files that the process may open nor its memory, 50 kB for each.

    Parameters
    ----------
    own : event loop
        The loop that serves.
    listener : socket
        Listens.
    factory : callable
        Makes a connection's protocol.
    context : SSLContext
        The server's certificate.
    most : int
        Handshakes at a time.
    """

    def __init__(
        self,
        own: asyncio.AbstractEventLoop,
        listener: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        most: int = MOST,
    ) -> None:
        self._loop, self._listener, self._factory, self._context, self._most = own, listener, factory, context, most
        self.sockets = (listener,)
        self._tasks: dict[asyncio.Task[None], None] = {}
        listener.setblocking(False)
        own.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        """Take the connections that are there, a few at a time: others want the loop too."""
        for _ in range(AT_ONCE):
            try:
                link, _ = self._listener.accept()
            except OSError:  # none is left; or no file is, then the next call tries again
                return
            link.setblocking(False)
            while len(self._tasks) >= self._most:
                oldest = next(iter(self._tasks))
                del self._tasks[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._greet(link))
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _greet(self, link: socket.socket) -> None:
        """Do the handshake; from then on the connection is its protocol's."""
        try:
            await self._loop.connect_accepted_socket(
                self._factory, link, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, asyncio.CancelledError):
            link.close()

    def close(self) -> None:
        """Take no more connections."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()

    async def wait_closed(self) -> None:
        """Return when all handshakes have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_serving(self) -> bool:
        """Return whether it takes connections."""
        return self._listener.fileno() >= 0

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return its loop."""
        return self._loop


def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that Uvicorn would take, whose servers with TLS are a :class:`Doorway`."""
    try:
        import uvloop
    except ImportError:
        new: Any = asyncio.new_event_loop()
    else:
        new = uvloop.new_event_loop()
    create = new.create_server

    @functools.wraps(create)
    async def create_server(factory: Any, host: Any = None, port: Any = None, **named: Any) -> Any:
        if named.get("ssl") is None or not isinstance(host, str) or "sock" in named:
            return await create(factory, host, port, **named)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=named.get("backlog") or 100)
        return Doorway(new, listener, factory, named["ssl"])

    new.create_server = create_server
    return new  # type: ignore[no-any-return]


class Punctual(HttpToolsProtocol):
    """Uvicorn's connection with a deadline for each head, and few requests at a time.

    Uvicorn keeps all requests that come before the end of the answer to the first one, some 700 bytes for each of 19. A
    client may have the whole answer a moment before the application says that it ends, and ask again.
    """

    _head, _pipelined = 0, False

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
        """Pass on what has come; close the connection when a head has no end, nor what comes between two requests."""
        if (self.cycle is None or self.cycle.response_complete) and self not in waiting:
            self._head = 0
            waiting.come(self, self.loop.call_later)
        if self in waiting and self._head > LONGEST and not self._discards():
            waiting.end(self)
            return
        self._head += len(data)
        super().data_received(data)

    def _discards(self) -> bool:
        """Return whether the rest of a body with a length comes, whose call is answered: nothing of it stays."""
        cycle = self.cycle
        return (
            cycle is not None
            and cycle.response_complete
            and cycle.more_body
            and not any(name == b"transfer-encoding" for name, _ in cycle.scope["headers"])
        )

    def on_message_begin(self) -> None:
        """Begin to wait for the next request's head."""
        if len(self.pipeline) >= AHEAD:
            self._pipelined = True
            raise ValueError("too many requests before the answer to the first")  # the parser stops here
        super().on_message_begin()
        self._head = 0
        waiting.come(self, self.loop.call_later)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; who sends many at once gets no answer, and need not read it."""
        if self._pipelined:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """End the connection of a call that was answered before its body had come.

        To close it would be to read on until the other side agrees, for up to half a minute with TLS.
        """
        unread = self.cycle.more_body
        super().on_response_complete()
        if unread and self.transport.is_closing():
            self.loop.call_later(LINGER_S, self.transport.abort)

    def on_headers_complete(self) -> None:
        """Let the request through."""
        waiting.go(self)
        super().on_headers_complete()
