"""A real HAProxy with the gateway's configuration, before something that stands for the SuperLink.

tests/deploy/test_gateway.py reads the same promises in the file, where no HAProxy is.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import resource
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedcross.deploy import gateway
from fedcross.deploy.federation import prepare

HAPROXY = shutil.which("haproxy", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAPROXY is None, reason="no haproxy on this machine")]
PULL, OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/push-object"
LARGE = b"x" * 20_000
DEVICE, NEIGHBOUR = b"device", b"neighbour"
Ask = Callable[..., int]
Raw = Callable[..., ssl.SSLSocket]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Behind(ThreadingHTTPServer):
    """Answers with `status`, and 401 to the keys in `refused`, once nothing holds it up."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, keys: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.status, self.go, self.seen, self.held = 200, threading.Event(), list[str](), Counter[str]()
        self.refused = set[str]()
        self.go.set()


class Answers(BaseHTTPRequestHandler):
    """Answers of :class:`Behind`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer HAProxy's question whether it is there."""
        self._answer(200)

    def do_POST(self) -> None:
        """Answer a call."""
        behind: Any = self.server
        self.rfile.read(int(self.headers["content-length"]))
        behind.seen.append(self.path)
        behind.held[self.headers["x-forwarded-for"]] += 1
        behind.go.wait(60)
        self._answer(401 if self.headers["flwr-public-key"] in behind.refused else behind.status)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def signed(key: bytes) -> dict[str, str]:
    """Return the headers of a call that the owner of `key` has signed; the gateway checks no signature."""
    return {"flwr-public-key": base64.b64encode(key).decode(), "flwr-signature": "x", "flwr-timestamp": "x"}


@pytest.fixture(scope="module")
def gate() -> Iterator[tuple[Behind, Ask, Raw]]:
    """The gateway: what is behind it, a function that makes a call from an address, and one that connects from one."""
    with tempfile.TemporaryDirectory(prefix="fc-") as folder:  # a socket's path is short
        prepare(Path(folder) / "keys", [])
        keys, port = Path(folder) / "keys" / "server", free_port()
        behind = Behind(keys)
        threading.Thread(target=behind.serve_forever, daemon=True).start()
        command = gateway.prepare(keys, Path(folder) / "g", f"127.0.0.1:{behind.server_port}", f"127.0.0.1:{port}")
        context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        context.check_hostname = False

        def ask(
            path: str = PULL,
            body: bytes = b"x",
            address: str = "127.0.0.1",
            key: bytes | None = DEVICE,
            **headers: str,
        ) -> int:
            link = http.client.HTTPSConnection("127.0.0.1", port, context=context, source_address=(address, 0))
            own = {k.replace("_", "-"): v for k, v in headers.items()}
            told = {"content-type": "application/protobuf", **(signed(key) if key else {}), **own}
            with closing(link):
                try:
                    link.request("POST", path, body, told)
                    return link.getresponse().status
                except OSError:  # refused before the body was read
                    return 503

        def raw(address: str, bare: bool = False) -> socket.socket:
            link = socket.create_connection(("127.0.0.1", port), 60, (address, 0))
            return link if bare else context.wrap_socket(link)

        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: ask(address="127.0.0.99") == 200, 60)
                yield behind, ask, raw
            finally:
                behind.go.set()
                process.terminate()
                behind.shutdown()
                behind.server_close()


@pytest.fixture
def door(gate: tuple[Behind, Ask, Raw]) -> tuple[Behind, Ask]:
    return gate[:2]


def at_once(
    ask: Ask, count: int, address: str, path: str = PULL, key: bytes = DEVICE
) -> tuple[list[threading.Thread], Counter[int]]:
    found: Counter[int] = Counter()
    threads = [
        threading.Thread(target=lambda: found.update([ask(path=path, address=address, key=key)]), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads, found


def flooded(raw: Raw, address: str, request: bytes, count: int) -> bytes:
    """Return what comes back for so many requests over one connection, until the gateway closes it."""
    found = b""
    with closing(raw(address)) as link, contextlib.suppress(OSError):
        for _ in range(count // 100):
            link.sendall(100 * request)
        while piece := link.recv(1 << 16):
            found += piece
    return found


def test_one_address_has_its_share_of_small_calls_and_others_pass(door: tuple[Behind, Ask]) -> None:
    behind, ask = door
    known, other, stranger = "127.0.0.2", "127.0.0.3", "127.0.0.4"
    assert [ask(address=known), ask(address=other)] == [200, 200]
    before = Counter(behind.held)
    behind.go.clear()
    calls, answers = at_once(ask, 30, known)
    transfers, objects = at_once(ask, 12, known, "/v1/fleet/pull-object")  # they have a share of their own
    strange, told = at_once(ask, 10, stranger)
    near, heard = at_once(ask, 10, known, key=NEIGHBOUR)  # a stranger at the address of a known one
    wait_until(lambda: (answers[503], told[503], heard[503]) == (22, 6, 6), 60)
    others, passed = at_once(ask, 3, other)
    wait_until(lambda: behind.held[other] - before[other] == 3, 60)  # at the SuperLink, beside all of the first
    wait_until(lambda: behind.held[known] - before[known] == 24, 60)
    behind.go.set()
    for thread in [*calls, *transfers, *strange, *near, *others]:
        thread.join(60)
    assert (answers, objects) == ({200: 8, 503: 22}, {200: 12})
    assert (told, heard, passed) == ({200: 4, 503: 6}, {200: 4, 503: 6}, {200: 3})


def test_one_key_has_twelve_transfers_from_however_many_addresses(door: tuple[Behind, Ask]) -> None:
    """Slow bodies from three addresses would fill the slots for all transfers."""
    behind, ask = door
    addresses, other = [f"127.0.0.{i}" for i in (21, 22, 23)], "127.0.0.24"
    assert [ask(address=address) for address in (*addresses, other)] == [200] * 4
    assert ask(address=other, key=NEIGHBOUR) == 200
    before = Counter(behind.held)
    behind.go.clear()
    found = [at_once(ask, 12, address, "/v1/fleet/pull-object") for address in addresses]
    wait_until(lambda: sum(answers[503] for _, answers in found) == 24, 60)
    near, passed = at_once(ask, 12, other, "/v1/fleet/pull-object", NEIGHBOUR)
    wait_until(lambda: behind.held[other] - before[other] == 12, 60)
    behind.go.set()
    for thread in [*near, *(thread for threads, _ in found for thread in threads)]:
        thread.join(60)
    assert sum((answers for _, answers in found), Counter()) == {200: 12, 503: 24}
    assert passed == {200: 12}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a refused socket is not closed by ssl
def test_bare_connections_of_many_addresses_leave_places_for_those_with_few(gate: tuple[Behind, Ask, Raw]) -> None:
    """As after a restart of the gateway, when no device is known."""
    _, ask, raw = gate
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        with contextlib.ExitStack() as stack:
            for number in range(61):
                for _ in range(32):
                    with contextlib.suppress(OSError):
                        stack.enter_context(closing(raw(f"127.0.1.{number + 1}", bare=True)))
            opened = 0
            for _ in range(6):
                with contextlib.suppress(OSError):
                    stack.enter_context(closing(raw("127.0.2.1"))).do_handshake()
                    opened += 1
            assert opened == 4
            assert ask(address="127.0.2.2") == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_for_a_websocket_ends_here(door: tuple[Behind, Ask]) -> None:
    behind, ask = door
    assert ask(address="127.0.0.25") == 200
    before = len(behind.seen)
    assert ask(body=b"", address="127.0.0.25", upgrade="websocket", connection="upgrade") == 400
    assert len(behind.seen) == before


def test_a_device_is_known_at_its_address_until_a_call_of_its_own_is_refused(door: tuple[Behind, Ask]) -> None:
    behind, ask = door
    address = "127.0.0.7"
    assert ask(OBJECT, LARGE, address) == 503
    behind.status = 403  # a run is over: not accepted for the first time by that
    assert ask(address=address) == 403
    behind.status = 200
    assert ask(OBJECT, LARGE, address) == 503
    assert ask(address=address) == 200
    assert ask(OBJECT, LARGE, address, NEIGHBOUR) == 503
    assert ask(OBJECT, LARGE, "127.0.0.77") == 503
    for status, after in ((403, 200), (401, 503)):
        assert ask(OBJECT, LARGE, address) == 200
        behind.status = status
        assert ask(address=address) == status
        behind.status = 200
        assert ask(OBJECT, LARGE, address) == after


def test_a_key_is_one_in_however_many_ways_it_is_written(door: tuple[Behind, Ask]) -> None:
    """Else one device would have as many limits as it finds ways."""
    _, ask = door
    ways = [{"flwr_public_key": way} for way in ("AAAB/+==", "AAAB//==")]
    assert base64.b64decode("AAAB/+==") == base64.b64decode("AAAB//==")
    assert ask(address="127.0.0.11", **ways[0]) == 200
    assert ask(OBJECT, LARGE, "127.0.0.11", **ways[1]) == 200


def test_nobody_elses_calls_cut_a_device_off(gate: tuple[Behind, Ask, Raw]) -> None:
    """Not from its own address either, signed or not, however many: the 401 are not the device's."""
    behind, ask, raw = gate
    address = "127.0.0.12"
    behind.refused.add(signed(NEIGHBOUR)["flwr-public-key"])
    assert ask(address=address) == 200
    before = len(behind.seen)
    assert ask(address=address, key=None) == 401
    assert len(behind.seen) == before  # what nobody signed does not reach the SuperLink
    assert ask(address=address, key=NEIGHBOUR) == 401
    assert ask(OBJECT, LARGE, address) == 200
    for key in ({}, signed(NEIGHBOUR)):
        lines = "".join(f"{name}: {value}\r\n" for name, value in key.items())
        head = f"POST {PULL} HTTP/1.1\r\nhost: x\r\n{lines}content-type: application/protobuf\r\n"
        found = flooded(raw, address, f"{head}content-length: 0\r\n\r\n".encode(), 400)
        assert bool(key) == (b"\r\nserver: " in found.lower())
        assert 100 < found.count(b"HTTP/1.1 401") <= 300
        assert [ask(OBJECT, LARGE, address), ask(address=address)] == [200, 200]
        # Another device that starts there is let in, at once where nobody signs.
        tries = 100 if key else 1
        assert 200 in [ask(address=address, key=b"new %d" % tries) for _ in range(tries)]
    assert ask("/v1/control/list-runs", address=address, key=None) == 503  # its connection was closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a refused socket is not closed by ssl
def test_an_address_has_many_connections_while_a_device_is_known_there(gate: tuple[Behind, Ask, Raw]) -> None:
    behind, ask, raw = gate
    known, unknown, refused = "127.0.0.15", "127.0.0.16", "127.0.0.17"
    assert [ask(address=known), ask(address=refused)] == [200, 200]
    behind.status = 401
    assert ask(address=refused) == 401
    behind.status = 200
    for address, most in ((known, 40), (unknown, 32), (refused, 32)):
        with contextlib.ExitStack() as stack:
            opened = 0
            for _ in range(40):
                with contextlib.suppress(OSError):
                    stack.enter_context(closing(raw(address))).do_handshake()
                    opened += 1
        assert opened == most, address


def test_an_unsigned_call_is_told_the_time(gate: tuple[Behind, Ask, Raw]) -> None:
    """A device that starts compares its clock so."""
    _, _, raw = gate
    with closing(raw("127.0.0.18")) as link:
        lines = (f"POST {PULL} HTTP/1.1", "host: x", "content-type: application/protobuf", "content-length: 0", "", "")
        link.sendall("\r\n".join(lines).encode())
        head = link.recv(1 << 16).decode().lower()
    (date,) = [line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("date: ")]
    assert abs(parsedate_to_datetime(date).timestamp() - time.time()) < 60


def test_a_stranger_leaves_its_connection_once_they_are_many(gate: tuple[Behind, Ask, Raw]) -> None:
    _, ask, raw = gate
    address = "127.0.0.13"
    assert ask(address=address) == 200
    request = b"POST /no-such-path HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(closing(raw(address))) for _ in range(33)]
        links[0].sendall(request)
        assert b"connection: close" in links[0].recv(1 << 16).lower()
        assert links[0].recv(1) == b""
    with closing(raw("127.0.0.14")) as link:
        link.sendall(request)
        assert b"connection: close" not in link.recv(1 << 16).lower()


def test_what_the_superlink_would_write_into_its_log_does_not_reach_it(door: tuple[Behind, Ask]) -> None:
    behind, ask = door
    ask(address="127.0.0.8")
    before = len(behind.seen)
    assert ask(f"{PULL}?{'B' * 14_000}", address="127.0.0.8") in (400, 431)
    assert ask(f"{PULL}?", address="127.0.0.8") == 400
    assert ask(address="127.0.0.8", content_type="A" * 3000) == 415
    assert ask(address="127.0.0.8", content_type="application/json") == 415
    assert ask(address="127.0.0.8", x_more="A" * 5000) == 431
    assert len(behind.seen) == before
    assert ask(address="127.0.0.8", x_more="A" * 2000) == 200


def test_a_stranger_who_floods_loses_its_connection(gate: tuple[Behind, Ask, Raw]) -> None:
    _, ask, raw = gate
    # HAProxy answers this by itself, so that 400 of them take milliseconds.
    request = b"POST /no-such-path HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    assert flooded(raw, "127.0.0.9", request, 400).count(b"HTTP/1.1 403") <= 300
    assert ask(address="127.0.0.10") == 200
