"""Connections on which no request comes, at a real web server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from fedcross.core.trust.signing import make_authority, make_server
from fedcross.engines.executor import punctual
from fedcross.engines.executor.punctual import Doorway, Punctual, Waiting

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
PATIENCE_S = 60


class Clock:
    """An event loop's timers, run by hand."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def later(self, seconds: float, call: Any, *arguments: Any) -> Any:
        """Note a timer."""
        self.timers.append([seconds, call, arguments, False])
        timer = self.timers[-1]

        class Handle:
            @staticmethod
            def cancel() -> None:
                timer[3] = True

        return Handle()


class Connection:
    """What :class:`Waiting` needs of a connection."""

    def __init__(self) -> None:
        self.transport, self.ended = self, False

    def abort(self) -> None:
        """Be closed."""
        self.ended = True


def test_who_waits_longest_is_closed_when_too_many_wait() -> None:
    waiting, clock, made = Waiting(2, 10), Clock(), [Connection() for _ in range(3)]
    for one in made:
        waiting.come(one, clock.later)
        waiting.come(one, clock.later)  # its deadline stays the first one
    assert [one.ended for one in made] == [True, False, False]
    assert [timer[0] for timer in clock.timers] == [10, 10, 10]
    assert [timer[3] for timer in clock.timers] == [True, False, False]


def test_a_head_that_does_not_come_ends_the_connection_and_one_that_comes_does_not() -> None:
    waiting, clock, made = Waiting(), Clock(), [Connection() for _ in range(2)]
    for one in made:
        waiting.come(one, clock.later)
    waiting.go(made[0])
    waiting.go(made[0])
    assert [timer[3] for timer in clock.timers] == [True, False]
    _, call, arguments, _ = clock.timers[1]
    call(*arguments)
    assert [one.ended for one in made] == [False, True]
    assert len(waiting) == 0


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request with its body."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]}
    )
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(app: Any = echo, **more: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(app, **more, port=0, http=Punctual, ws="none", lifespan="off", log_config=None, loop="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@pytest.mark.parametrize("other", [False, True], ids=["uvloop", "asyncio"])
def test_a_handshake_that_does_not_come_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """With Flower's start: ``uvicorn.run`` makes the loop from the function."""
    if other:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.setattr(punctual, "HANDSHAKE_S", 0.05)
    pair = make_server(make_authority(tmp_path / "ca"), tmp_path / "server", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.public, pair.private)

    async def tried() -> bytes:
        begun = asyncio.get_running_loop()
        begun.set_exception_handler(lambda *_: None)
        server = await begun.create_server(asyncio.Protocol, host="127.0.0.1", port=0, ssl=context)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        found = await answer(reader)
        writer.close()
        server.close()
        plain = await begun.create_server(asyncio.Protocol, host="127.0.0.1", port=0)  # no TLS, no such limit
        plain.close()
        return found

    with asyncio.Runner(loop_factory=uvicorn.Config(echo, loop=punctual.loop).get_loop_factory()) as runner:  # type: ignore[arg-type]
        assert type(runner.get_loop()).__module__.startswith("asyncio" if other else "uvloop")
        assert runner.run(tried()) == b""


def test_of_many_handshakes_that_do_not_come_the_oldest_end_and_an_honest_one_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times as many idle connections as there may be, long before their time is over."""
    monkeypatch.setattr(punctual, "HANDSHAKE_S", 10 * PATIENCE_S)
    pair = make_server(make_authority(tmp_path / "ca"), tmp_path / "server", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.public, pair.private)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca.crt"))

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def tried() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        door = Doorway(asyncio.get_running_loop(), listener, Echo, context, most=5)
        place = listener.getsockname()
        idle = [await asyncio.open_connection(*place) for _ in range(100)]
        reader, writer = await asyncio.open_connection(*place, ssl=trusted, server_hostname="127.0.0.1")
        writer.write(b"body")
        found = await reader.readexactly(4)
        for one, _ in idle[:95]:
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    assert await one.read(1) == b""
        for _, one in [*idle, (reader, writer)]:
            one.close()
        door.close()
        door.close()
        await door.wait_closed()
        assert not door.is_serving()
        return found

    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(tried()) == b"body"


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Return what comes: an answer with four bytes of body, or what was sent before the connection's end."""
    found = b""
    with contextlib.suppress(ConnectionError):  # that nothing comes is no end: TimeoutError
        while not found.endswith(b"\r\n\r\nbody"):
            async with asyncio.timeout(PATIENCE_S):
                piece = await reader.read(1024)
            if not piece:
                break
            found += piece
    return found


async def poured(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Send header lines until the other side closes, 100 times as much as a head may have; return how many bytes."""
    sent = 0
    with contextlib.suppress(OSError):
        while not reader.at_eof() and sent < 100 * punctual.LONGEST:
            writer.write(b"x: " + b"y" * 16384 + b"\r\n")
            await writer.drain()
            sent += 16384
            await asyncio.sleep(0)
    writer.close()
    return sent


@pytest.mark.parametrize("beginning", [b"", b"POST / HT", HEAD])
def test_a_connection_without_a_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(punctual, "waiting", Waiting(seconds=0.05))

    async def tried() -> bytes:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(beginning)
            found = await answer(reader)
            writer.close()
            return found

    assert asyncio.run(tried()) == b""
    assert len(punctual.waiting) == 0


def test_a_slow_body_and_a_second_request_are_none_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punctual, "waiting", Waiting(seconds=5))

    async def tried() -> list[bytes]:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = []
            for _ in range(2):
                writer.write(HEAD + b"\r\nbo")
                await writer.drain()
                while len(punctual.waiting):
                    await asyncio.sleep(0.01)
                writer.write(b"dy")
                found.append(await answer(reader))
            writer.close()
            return found

    assert all(one.startswith(b"HTTP/1.1 200") for one in asyncio.run(tried()))


def test_a_second_request_has_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punctual, "waiting", Waiting(seconds=0.2))

    async def tried() -> list[bytes]:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"\r\nbody")
            found = [await answer(reader)]
            writer.write(HEAD)
            found.append(await answer(reader))
            writer.close()
            return found

    first, second = asyncio.run(tried())
    assert first.endswith(b"body")
    assert second == b""


@pytest.mark.parametrize("stray", [b"\r\n", b"a: b\r\n"], ids=["an empty line", "the beginning of a head"])
def test_what_comes_between_two_requests_has_a_deadline(monkeypatch: pytest.MonkeyPatch, stray: bytes) -> None:
    """Any byte ends Uvicorn's own wait for the next request."""
    monkeypatch.setattr(punctual, "waiting", Waiting(seconds=0.2))

    async def tried() -> list[bytes]:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"\r\nbody")
            found = [await answer(reader)]
            writer.write(stray)
            found.append(await answer(reader))
            writer.close()
            return found

    first, second = asyncio.run(tried())
    assert first.endswith(b"body")
    assert second == b"" or second.startswith(b"HTTP/1.1 400")


def test_trailers_without_an_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an answer; Uvicorn's parser keeps each as a header. 2 GB of them ended the SuperLink."""
    monkeypatch.setattr(punctual, "waiting", Waiting(seconds=PATIENCE_S))

    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"body"})

    async def tried() -> int:
        async with served(early) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
            await answer(reader)
            return await poured(reader, writer)

    assert asyncio.run(tried()) < 100 * punctual.LONGEST


def test_requests_in_advance_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """14,000 of 19 bytes in one go, whose answers nobody reads, were 11 MB of memory each time."""
    monkeypatch.setattr(punctual, "waiting", Waiting())
    begun = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await asyncio.sleep(PATIENCE_S)

    async def tried() -> bytes:
        async with served(slow) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /first HTTP/1.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 1000)
            found = await answer(reader)
            writer.close()
            return found

    assert asyncio.run(tried()) == b""
    assert len(begun) <= 1


def test_a_body_that_nobody_reads_ends_with_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TLS, whose end the caller does not confirm."""
    monkeypatch.setattr(punctual, "LINGER_S", 0.05)
    pair = make_server(make_authority(tmp_path / "ca"), tmp_path / "server", ["127.0.0.1"])
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca.crt"))

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def bring(port: int) -> bool:
        bare = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        with trusted.wrap_socket(bare, server_hostname="127.0.0.1") as link:
            link.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2147483648\r\n\r\n")
            for _ in range(256):
                try:
                    link.sendall(bytes(1 << 20))
                except OSError:
                    return True
                time.sleep(0.01)
        return False

    async def tried() -> bool:
        files = {"ssl_certfile": str(pair.public), "ssl_keyfile": str(pair.private)}
        async with served(refuse, **files) as port:
            return await asyncio.to_thread(bring, port)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # asyncio's own ends it at once
        assert runner.run(tried())


def test_a_client_that_has_the_whole_answer_may_ask_again_before_the_application_has_ended_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Starlette's middleware sends the end apart; httpx counts the bytes and uses the connection again."""
    monkeypatch.setattr(punctual, "waiting", Waiting())
    asked = asyncio.Event()

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"body", "more_body": True})
        await asked.wait()
        await send({"type": "http.response.body", "body": b""})

    async def tried() -> list[bytes]:
        async with served(late) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            found = [await answer(reader)]
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.05)
            asked.set()
            found.append(await answer(reader))
            writer.close()
            return found

    assert all(one.endswith(b"body") for one in asyncio.run(tried()))


def test_a_head_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punctual, "waiting", Waiting(seconds=PATIENCE_S))

    async def tried() -> int:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            return await poured(reader, writer)

    assert asyncio.run(tried()) < 100 * punctual.LONGEST
