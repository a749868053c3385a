from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import URLError

import httpx
import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, FederationError, StorageError
from fedcross.engines import certificates as signing
from fedcross.engines import flower, remote, runs


@pytest.mark.parametrize(
    ("address", "parts"),
    [("superlink:8000", ("superlink", 8000)), ("192.0.2.7:1", ("192.0.2.7", 1)), ("[::1]:8000", ("[::1]", 8000))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert remote.host_and_port(address) == parts


@pytest.mark.parametrize("address", ["", "host", ":1", "https://h:1", "h:x", "a b:1", "::1:8000"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        remote.host_and_port(address)
    with pytest.raises(ConfigError, match=r"engine\.address"):
        load(["engine=remote", f"engine.address='{address}'", "engine.authority=ca.crt"])


def raising(error: Exception):
    def call(*_: object, **__: object) -> None:
        raise error

    return call


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def superlink(tmp_path: Path):
    """Yield the address and the authority of something that answers /health over TLS."""
    authority = signing.make_authority(tmp_path / "ca")
    pair = signing.make_server(authority, tmp_path / "server", ["localhost", "127.0.0.1"])
    server = HTTPServer(("127.0.0.1", 0), Health)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.public, pair.private)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}", authority.public
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_superlink_that_answers(superlink: tuple[str, Path]) -> None:
    remote.wait_for(*superlink, seconds=300)


def test_another_authority_is_said_at_once(superlink: tuple[str, Path], tmp_path: Path) -> None:
    other = signing.make_authority(tmp_path / "other").public
    with pytest.raises(FederationError, match="its certificate is refused") as caught:
        remote.wait_for(superlink[0], other, seconds=600)
    assert "within" not in str(caught.value)


@pytest.mark.parametrize("what", ["answers 404 to /health", "does not speak TLS"])
def test_who_is_no_superlink_is_not_waited_for(superlink: tuple[str, Path], what: str, monkeypatch) -> None:
    if "TLS" in what:
        broken = ssl.SSLError(1, "wrong version number")
        broken.reason = "WRONG_VERSION_NUMBER"
        monkeypatch.setattr(remote.urllib.request, "urlopen", raising(URLError(broken)))
    else:
        monkeypatch.setattr(Health, "status", 404)
    with pytest.raises(FederationError, match=what):
        remote.wait_for(*superlink, seconds=600)


def test_a_superlink_with_an_error_of_its_own_is_waited_for(superlink: tuple[str, Path], monkeypatch) -> None:
    monkeypatch.setattr(Health, "status", 503)
    with pytest.raises(FederationError, match=r"no answer within 0 s \(Service Unavailable\)"):
        remote.wait_for(*superlink, seconds=0.01)


def test_nobody_there(tmp_path: Path) -> None:
    authority = signing.make_authority(tmp_path / "ca").public
    with pytest.raises(FederationError, match="Is it running"):
        remote.wait_for("127.0.0.1:1", authority, seconds=0.1)
    with pytest.raises(StorageError, match=r"not a readable certificate .* engine\.authority=FILE"):
        remote.wait_for("127.0.0.1:1", tmp_path / "none", seconds=0.1)


class Client:
    """Stands for a client of a SuperLink that gives `answer` to each call."""

    def __init__(self, status: int = 200, text: str = "") -> None:
        self._answer = httpx.Response(status, text=text, request=httpx.Request("POST", "https://h"))

    def ListNodes(self, request: object) -> None:
        self._answer.raise_for_status()

    def close(self) -> None:
        """Nothing is open."""


def test_an_error_of_the_superlink_is_no_refusal():
    internal = Client(500, '{"detail":"Internal server error."}')
    said = (
        r"^SuperLink h:1: an error of its own \(500, Internal server error\)\. Its log says which\..* --database FILE"
    )
    with pytest.raises(FederationError, match=said), remote.refusals("h:1"):
        internal.ListNodes(None)
    for answer in ('{"detail":"No such run."}', "No such run."):
        with pytest.raises(FederationError, match=r"^SuperLink h:1 refuses: No such run\.$"), remote.refusals("h:1"):
            Client(404, answer).ListNodes(None)


@pytest.mark.parametrize("cut", [KeyboardInterrupt(), SystemExit(143)])
def test_who_ends_the_watching_stops_the_run(tmp_path, monkeypatch, capsys, cut):
    stopped = []

    def broken(*_, started):
        started(7)
        raise cut

    monkeypatch.setattr(remote, "wait_for", lambda *_: None)
    monkeypatch.setattr(remote.bundle, "make", lambda folder, _: folder)
    monkeypatch.setattr(remote.bundle, "build", lambda *_: None)
    monkeypatch.setattr(flower, "control_client", lambda *_: Client())
    monkeypatch.setattr(runs, "start", lambda *_: 7)
    monkeypatch.setattr(runs, "complete", broken)
    monkeypatch.setattr(runs, "stop", lambda _, number: stopped.append(number))
    params = remote.Params(address="h:1", authority=tmp_path / "ca.crt")
    with pytest.raises(type(cut)):
        remote.submit(params, "rounds=1", tmp_path / "work")
    assert stopped == [7]
    assert "Run 7 is stopped" in capsys.readouterr().err
    assert remote.submit(params, "rounds=1", tmp_path / "work", watch=False) == 7  # nobody watches: nobody stops it
    assert stopped == [7]


def test_a_port_that_no_machine_has_is_refused() -> None:
    assert remote.host_and_port("h:65535") == ("h", 65535)
    with pytest.raises(ConfigError, match="no port above 65535"):
        remote.host_and_port("h:99999")
