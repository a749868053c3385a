"""A real HAProxy with the gateway's configuration, before something that stands for the SuperLink."""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import flwr
import pytest

from fedcross.core.settings import fingerprint
from fedcross.deploy import keys, start
from fedcross.engines.flower import free_ports

HAPROXY = shutil.which("haproxy", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="no haproxy on this machine")
PULL, PUSH, OBJECT = (f"/v1/fleet/{name}" for name in ("pull-messages", "push-messages", "push-object"))
CONFIG = (Path(start.__file__).parent / "gateway.cfg").read_text()


class Behind(ThreadingHTTPServer):
    """Answers everything with its `status` once nothing holds it up; remembers paths, sizes of bodies, cut calls."""

    daemon_threads, request_queue_size, status = True, 128, 200

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.go, self.seen, self.cut = threading.Event(), list[tuple[str, int]](), list[str]()
        self.go.set()


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body, behind = self.rfile.read(int(self.headers["content-length"])), self.server
        behind.seen.append((self.path, len(body)))  # type: ignore[attr-defined]
        while not behind.go.wait(0.05):  # type: ignore[attr-defined]
            if select.select([self.connection], [], [], 0)[0]:  # the caller has closed the connection
                self.close_connection = True
                behind.cut.append(self.path)  # type: ignore[attr-defined]
                return
        self._answer()

    def _answer(self) -> None:
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@dataclass
class Gate:
    """The gateway, what is behind it, and ways to call it."""

    behind: Behind
    port: int
    page_port: int
    context: ssl.SSLContext
    authority: Path
    log: list[str] = field(default_factory=list)

    def raw(self, address: str, *, bare: bool = False) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.port), 30, (address, 0))
        return link if bare else self.context.wrap_socket(link)

    def ask(
        self,
        path: str = PULL,
        body: bytes = b"x",
        address: str = "127.0.0.1",
        key: bytes | None = b"device",
        method: str = "POST",
        link: http.client.HTTPSConnection | None = None,
        **headers: Any,
    ) -> int:
        """Return the status of one call, over the open `link` if there is one; 0 if the connection was refused."""
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        signed = {"flwr-public-key": base64.b64encode(key).decode()} if key else {}
        told = {"content-type": "application/protobuf", **signed, **own}
        with contextlib.nullcontext(link) if link else closing(self.link(address)) as link:
            try:
                link.request(method, path, body, {name: value for name, value in told.items() if value})
                with link.getresponse() as response:
                    response.read()
                    return response.status
            except (OSError, http.client.HTTPException):
                link.close()
                return 0

    def link(self, address: str) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=self.context, source_address=(address, 0))

    def at_once(self, count: int, address: str, key: bytes) -> tuple[list[threading.Thread], Counter[int]]:
        found: Counter[int] = Counter()
        threads = [
            threading.Thread(target=lambda: found.update([self.ask(address=address, key=key)])) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        return threads, found


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gateway")
    keys.init(folder)
    behind = Behind(folder / "server")
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    port, page_port, page = free_ports(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        superlink = f"127.0.0.1:{behind.server_port}"
        listen = f"127.0.0.1:{port}", f"127.0.0.1:{page_port}"
        command = start.gateway(folder / "server", superlink, listen[0], f"127.0.0.1:{page}", listen[1])
        variables = dict(os.environ)
    context = ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))
    context.check_hostname = False
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        found = Gate(behind, port, page_port, context, folder / "server" / "ca.crt")
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        threading.Thread(target=lambda: found.log.extend(line.decode() for line in lines), daemon=True).start()
        try:
            wait_until(lambda: found.ask(address="127.0.0.99") == 200)
            yield found
        finally:
            behind.go.set()
            process.terminate()
            process.wait(20)
            behind.shutdown()
            behind.server_close()


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_paths_are_those_of_flowers_supernode() -> None:
    """Every Fleet call of Flower's client is let through, but registration: only an operator may register a key."""
    source = (Path(flwr.__file__).parent / "supernode" / "fleet_http_client.py").read_text()
    called = set(re.findall(r'path="(/v1/fleet/[a-z-]+)"', source))
    allowed = {path for line in re.findall(r"acl fleet path (.*)", CONFIG) for path in line.split()}
    assert called - allowed == {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    assert allowed < called
    assert len(CONFIG.splitlines()) <= 120


@needs_haproxy
@pytest.mark.parametrize(
    ("status", "call"),
    [
        (403, {"path": "/v1/control/list-runs"}),
        (403, {"path": "/v1/runtime/acquire-task"}),
        (403, {"path": "/v1/fleet/register-node"}),
        (403, {"path": "/health"}),
        (403, {"path": "/v1/fleet/../control/list-runs"}),
        (405, {"method": "GET", "body": b""}),
        (400, {"upgrade": "websocket"}),
        (400, {"path": f"{PULL}?x"}),
        (431, {"x_more": "A" * 5000}),
        (415, {"content_type": "application/json"}),
        (401, {"key": None}),
        (413, {"body": b"", "content_length": "16385"}),
        (413, {"path": PUSH, "body": b"", "content_length": "1048577"}),
        (413, {"path": OBJECT, "body": b"", "content_length": "629145600"}),
        (200, {"path": OBJECT, "body": b"x" * 5_300_000}),
        (200, {"path": PUSH, "body": b"x" * 1_000_000}),
    ],
)
def test_a_call_is_let_through_only_as_a_supernode_makes_it(gate: Gate, status: int, call: dict[str, Any]) -> None:
    before = len(gate.behind.seen)
    assert gate.ask(address="127.0.0.2", **call) == status
    assert len(gate.behind.seen) - before == (status == 200)
    if status == 200:
        assert gate.behind.seen[-1] == (call["path"], len(call["body"]))


@needs_haproxy
def test_a_superlink_that_stops_ends_no_supernode(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.behind, "status", 500)  # which a SuperNode does not repeat
    assert gate.ask(address="127.0.0.2", path=PULL) == 503


@needs_haproxy
def test_a_device_that_is_gone_takes_no_message(gate: Gate) -> None:
    """The SuperLink sees that the call was cut, and keeps the message for the device's next one."""
    gate.behind.go.clear()
    with closing(gate.link("127.0.0.10")) as link:
        link.request("POST", PULL, b"gone", {"content-type": "application/protobuf", "flwr-public-key": "eA=="})
        wait_until(lambda: (PULL, 4) in gate.behind.seen)
    try:
        wait_until(lambda: gate.behind.cut == [PULL], 10)
    finally:
        gate.behind.go.set()


@needs_haproxy
def test_a_key_has_six_calls_at_once_and_others_pass(gate: Gate) -> None:
    gate.behind.go.clear()
    threads, found = gate.at_once(10, "127.0.0.3", b"busy")
    wait_until(lambda: found[503] == 4)
    others, passed = gate.at_once(3, "127.0.0.3", b"other")
    before = len(gate.behind.seen)
    wait_until(lambda: len(gate.behind.seen) >= before)
    gate.behind.go.set()
    for thread in [*threads, *others]:
        thread.join(60)
    assert (found, passed) == ({200: 6, 503: 4}, {200: 3})


@needs_haproxy
def test_a_key_that_floods_is_refused_and_others_pass(gate: Gate) -> None:
    """A key can be written in several ways; decoded it is one."""
    assert base64.b64decode("AAAB/+==") == base64.b64decode("AAAB//==")
    with closing(gate.link("127.0.0.4")) as link:  # the limit holds for ten seconds: no handshake for each call
        found = Counter(gate.ask(link=link, flwr_public_key=("AAAB/+==", "AAAB//==")[i % 2]) for i in range(150))
    assert 100 <= found[200] <= 130
    assert found[503] == 150 - found[200]
    assert gate.ask(address="127.0.0.4", key=b"quiet") == 200


@needs_haproxy
def test_the_log_names_a_key_as_status_does_and_counts_its_addresses(gate: Gate) -> None:
    for address in ("127.0.0.11", "127.0.0.12", "127.0.0.11"):
        assert gate.ask(address=address, key=b"stolen") == 200
    own = f"key={fingerprint(b'stolen')} "
    wait_until(lambda: sum(own in line for line in gate.log) == 3)
    assert [line.split("from=")[1][0] for line in gate.log if own in line] == ["1", "2", "2"]


@needs_haproxy
def test_an_address_that_guesses_is_refused_and_others_pass(gate: Gate) -> None:
    with closing(gate.link("127.0.0.5")) as link:
        found = Counter(gate.ask("/v1/control/list-runs", link=link) for _ in range(90))
    assert found[403] <= 62
    assert found[503] + found[0] >= 28
    assert gate.ask(address="127.0.0.5") in (0, 503)
    assert gate.ask(address="127.0.0.6") == 200


@needs_haproxy
@pytest.mark.slow
def test_idle_connections_are_few_and_end_and_others_pass(gate: Gate) -> None:
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(200):
            with contextlib.suppress(ConnectionError):
                links.append(stack.enter_context(closing(gate.raw("127.0.0.7", bare=True))))
        assert gate.ask(address="127.0.0.8") == 200
        wait_until(lambda: len(select.select(links, [], [], 0)[0]) >= len(links) - 50)  # closed at once
        wait_until(lambda: len(select.select(links, [], [], 0)[0]) == len(links))  # the others at a head's deadline


@needs_haproxy
@pytest.mark.slow
def test_a_slow_head_and_a_slow_body_end_and_reach_nobody(gate: Gate) -> None:
    head = f"POST {PULL} HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\n"
    whole = f"{head}flwr-public-key: eA==\r\ncontent-length: 1000\r\n\r\n"
    before = len(gate.behind.seen)
    for sent in (head, whole):
        with closing(gate.raw("127.0.0.9")) as link:
            link.sendall(sent.encode())
            started, answer = time.monotonic(), b""
            link.settimeout(1)
            while not answer and time.monotonic() - started < 60:
                with contextlib.suppress(TimeoutError):
                    answer = link.recv(1 << 16)
                    break
                with contextlib.suppress(OSError):
                    link.sendall(b"x")  # a byte a second: no timeout of inactivity ends this
            assert b"408" in answer.split(b"\r\n")[0]
            assert 5 < time.monotonic() - started < 60
    assert len(gate.behind.seen) == before


@needs_haproxy
def test_the_page_has_its_own_port_and_only_its_paths(gate: Gate) -> None:
    def asked(path: str, method: str = "GET") -> int:
        link = http.client.HTTPSConnection("127.0.0.1", gate.page_port, context=gate.context)
        with closing(link):
            link.request(method, path)
            return link.getresponse().status

    assert (asked("/docs"), asked("/state", "POST"), asked(PULL)) == (403, 405, 403)
    with ThreadPoolExecutor() as pool:  # no run is on, which HAProxy says after three attempts, a second each
        assert [*pool.map(asked, ["/metrics", "/?token=secret"])] == [503, 503]
    assert not any("secret" in line for line in gate.log)
