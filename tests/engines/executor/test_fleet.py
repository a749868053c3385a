"""A device's calls outlast an error of the SuperLink and a handshake that is cut short; others end them as ever."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.proto import fleet_pb2, heartbeat_pb2
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import fleet_http_connection as connection

from fedcross.engines.executor import entry, fleet
from tests.support.clock import Clock

ANSWERS = {
    "register-node": fleet_pb2.RegisterNodeFleetResponse(node_id=7),
    "activate-node": fleet_pb2.ActivateNodeResponse(node_id=7),
    "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatResponse(success=True),
    "pull-messages": fleet_pb2.PullMessagesResponse(),
}


class Fleet(ThreadingHTTPServer):
    """Answers each call as a SuperLink does, after the statuses that `first` has for it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.first: dict[str, list[int]] = {}
        self.called: list[str] = []
        self.said: object = {}
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Fleet)
        self.rfile.read(int(self.headers["content-length"]))
        name = self.path.rsplit("/", 1)[-1]
        self.server.called.append(name)
        status = (self.server.first.get(name) or [200]).pop(0)
        found = ANSWERS.get(name)
        said = b"" if status == 200 else json.dumps(self.server.said).encode()
        body = found.SerializeToString() if found is not None and status == 200 else said
        self.send_response(status)
        self.send_header("content-type", "application/protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def superlink() -> Iterator[Fleet]:
    with Fleet() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time of the calls, whose pauses nobody waits for."""
    clock = Clock()

    def quick() -> Any:
        invoker = make_simple_http_retry_invoker()
        invoker.wait_function = clock.sleep
        return invoker

    monkeypatch.setattr(connection, fleet.MAKER, fleet.enduring(quick, clock.monotonic))
    return clock


def connected(superlink: Fleet) -> Any:
    return connection.http_request_response(f"127.0.0.1:{superlink.server_port}", insecure=True)


def test_a_device_outlasts_errors_of_the_superlink(superlink: Fleet, clock: Clock) -> None:
    superlink.first = {"activate-node": [500, 502], "pull-messages": [500, 503, 500]}
    with connected(superlink) as (node_id, receive, *_):
        assert node_id == 7
        assert receive() is None
    assert superlink.called.count("activate-node") == 3
    assert superlink.called.count("pull-messages") == 4


def test_a_superlink_that_fails_for_minutes_ends_the_call(superlink: Fleet, clock: Clock) -> None:
    superlink.first = {"pull-messages": [500] * 2000}
    failed = []
    with connected(superlink) as (_, receive, *_):
        try:
            receive()
        except httpx.HTTPStatusError as error:
            failed.append(error.response.status_code)
    assert failed == [500]
    assert clock.now > fleet.BUSY_S


def test_a_refusal_ends_the_call_at_once(superlink: Fleet, clock: Clock) -> None:
    superlink.first = {"pull-messages": [404, 200]}
    with connected(superlink) as (_, receive, *_), pytest.raises(httpx.HTTPStatusError):
        receive()
    assert superlink.called.count("pull-messages") == 1


@pytest.mark.slow
def test_a_device_says_what_it_waits_for(superlink: Fleet, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """At once after an error that Flower does not repeat, after a while otherwise; then after twice the time."""
    superlink.said = {"detail": "4 replies are not complete.\x1b[2J"}
    superlink.first = {"pull-messages": [503] * 60, "activate-node": [500]}
    with connected(superlink) as (_, receive, *_):
        receive()
    join, *lines = [one.getMessage() for one in caplog.records if "waiting" in one.getMessage()]
    assert "waiting to join the federation for 0 s: the SuperLink answers 500" in join
    assert "at the latest" in join
    assert clock.now > 300
    assert 3 <= len(lines) <= 8
    assert re.search(r"waiting for work for (1[5-9]|[2-4]\d) s: the SuperLink answers 503 ", lines[0])
    assert lines[0].endswith("(4 replies are not complete.?[2J); asked again, without an end")


def test_a_device_says_why_it_was_refused(superlink: Fleet, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    superlink.said = {"detail": "This reply is refused: it was made at nan."}
    superlink.first = {"pull-messages": [413], "get-run": [500] * 1000}
    with contextlib.suppress(httpx.HTTPStatusError), connected(superlink) as (_, receive, _, get_run, *_):
        with pytest.raises(httpx.HTTPStatusError):
            receive()
        get_run(1)
    lines = [one.getMessage() for one in caplog.records if "given up" in one.getMessage()]
    assert lines[0] == (
        "fedcross: given up for work: the SuperLink answers 413 (This reply is refused: it was made at nan)"
    )
    assert lines[1].startswith("fedcross: given up for the run's settings: the SuperLink answers 500")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, "<html>", "this device's key is not registered (any more)"),
        (412, "<html>", "its key is not registered, or it was revoked, or a device"),
    ],
)
def test_a_key_that_is_not_accepted_is_told_before_the_device_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, body: str, told: str
) -> None:
    monkeypatch.setattr(fleet, "SHUT_OUT", threading.Event())

    def ends(error: Exception) -> bool:
        assert f"given up to announce a reply: the SuperLink answers {status}: {told}" in caplog.text
        return True

    invoker: Any = SimpleNamespace(should_giveup=ends, invoke=lambda target: invoker.should_giveup(target()))
    request, answer = httpx.Request("POST", "http://h"), httpx.Response(status, text=body)

    def PushMessages() -> Exception:
        return httpx.HTTPStatusError("", request=request, response=answer)

    assert fleet.enduring(lambda: invoker)().invoke(PushMessages)
    assert fleet.SHUT_OUT.is_set() == (status == 401)


def test_a_device_outlasts_a_gateway_with_another_token(
    superlink: Fleet, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's programs are started anew one after the other: no device ends meanwhile, nor its heartbeat."""
    superlink.said = entry.NOT_THE_GATEWAY
    superlink.first = {"activate-node": [401], "pull-messages": [401] * 50}
    with connected(superlink) as (_, receive, *_):
        assert receive() is None
    lines = [one.getMessage() for one in caplog.records if "waiting for work" in one.getMessage()]
    assert clock.now > 300
    assert lines[0].endswith(
        "the SuperLink answers 401: its key is not the reason. Is this the SuperLink's own port (8000, usually)? Name "
        "the gateway's (8443). If it is the gateway's, the two have two different gateway.token: at the server, "
        "restart both together; asked again, without an end"
    )
    assert "given up" not in caplog.text
    superlink.first = {"send-node-heartbeat": [401]}
    with connection.FleetHttpClient.from_server_address(
        f"127.0.0.1:{superlink.server_port}", True, None, interceptors=[]
    ) as client:
        beat = fleet.beating(client.SendNodeHeartbeat)
        with pytest.raises(httpx.TransportError):  # which Flower's sender takes for no answer
            beat(heartbeat_pb2.SendNodeHeartbeatRequest())
    assert not fleet.SHUT_OUT.is_set()


def test_a_heartbeat_that_is_refused_says_why(
    superlink: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SHUT_OUT", threading.Event())
    superlink.first = {"send-node-heartbeat": [401]}
    with (
        connection.FleetHttpClient.from_server_address(
            f"127.0.0.1:{superlink.server_port}", True, None, interceptors=[]
        ) as client,
        pytest.raises(httpx.HTTPStatusError),
    ):
        fleet.beating(client.SendNodeHeartbeat)(heartbeat_pb2.SendNodeHeartbeatRequest())
    assert "given up to tell that this device is there: the SuperLink answers 401: this device's key" in caplog.text
    assert fleet.SHUT_OUT.is_set()


def test_a_run_that_is_over_is_no_refusal() -> None:
    for status, over in ((400, True), (401, True), (403, False), (500, False), (503, False)):
        answer = httpx.Response(status)
        error = httpx.HTTPStatusError("", request=httpx.Request("POST", "http://h"), response=answer)
        assert fleet.refused(error) == over
    assert not fleet.refused(httpx.ConnectError("no"))
    assert fleet.reason(httpx.ConnectError("")) == "the SuperLink cannot be reached (ConnectError)"


def hang_up(door: socket.socket) -> None:
    """Take one connection and end it where the handshake has begun."""
    caller, _ = door.accept()
    with caller:
        caller.shutdown(socket.SHUT_WR)
        while caller.recv(4096):
            pass


def test_a_handshake_that_is_cut_short_is_made_again() -> None:
    """With the error that a real connection gives, at which Flower's own code gives up."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=hang_up, args=(door,), daemon=True).start()
        with pytest.raises(httpx.TransportError) as cut:
            httpx.get(f"https://127.0.0.1:{door.getsockname()[1]}", timeout=20)
    gives_up = make_simple_http_retry_invoker().should_giveup
    assert gives_up is not None
    assert gives_up(cut.value)
    assert fleet.patience(cut.value) == math.inf


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"), None),
        (httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"), math.inf),
        (httpx.ConnectError("Connection refused"), None),  # Flower makes it again without an end
        (httpx.HTTPStatusError("", request=httpx.Request("POST", "http://h"), response=httpx.Response(503)), None),
        (httpx.HTTPStatusError("", request=httpx.Request("POST", "http://h"), response=httpx.Response(401)), None),
        (httpx.HTTPStatusError("", request=httpx.Request("POST", "http://h"), response=httpx.Response(500)), 300.0),
        (ValueError("ssl"), None),
    ],
)
def test_what_passes_and_what_does_not(error: Exception, seconds: float | None) -> None:
    assert fleet.patience(error) == seconds


def test_a_certificate_of_another_authority_is_told_before_the_device_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Flower says "SSL/TLS handshake error detected" only."""

    def call() -> None:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local ...")

    with pytest.raises(httpx.ConnectError):
        fleet.enduring(make_simple_http_retry_invoker)().invoke(call)
    (told,) = [one.getMessage() for one in caplog.records if "given up" in one.getMessage()]
    assert told.endswith(fleet.UNTRUSTED)
    assert "is not signed by this device's ca.crt" in fleet.UNTRUSTED


def test_an_error_of_the_superlink_ends_no_heartbeat(superlink: Fleet) -> None:
    noted = []
    with connection.FleetHttpClient.from_server_address(
        f"127.0.0.1:{superlink.server_port}", True, None, interceptors=[]
    ) as client:
        beat = fleet.beating(fleet.noting(client.SendNodeHeartbeat, lambda: noted.append(1)))
        superlink.first = {"send-node-heartbeat": [500, 404]}
        with pytest.raises(httpx.TransportError):  # which Flower's sender takes for no answer
            beat(heartbeat_pb2.SendNodeHeartbeatRequest())
        with pytest.raises(httpx.HTTPStatusError):
            beat(heartbeat_pb2.SendNodeHeartbeatRequest())
        assert noted == []
        assert beat(heartbeat_pb2.SendNodeHeartbeatRequest()).success
        assert noted == [1]


def test_the_calls_of_this_version_of_flower_are_changed(monkeypatch: pytest.MonkeyPatch, superlink: Fleet) -> None:
    client, noted = connection.FleetHttpClient, []
    monkeypatch.setattr(connection, fleet.MAKER, make_simple_http_retry_invoker)
    for name in fleet.CALLS:
        monkeypatch.setattr(client, name, getattr(client, name))
    fleet.endure(lambda: noted.append(1))
    with connected(superlink) as (_, receive, *_):
        before = len(noted)
        receive()
        assert len(noted) > before > 0
    assert getattr(connection, fleet.MAKER) is not make_simple_http_retry_invoker


def test_calls_that_are_not_known_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(connection, fleet.MAKER)
    fleet.endure(lambda: None)
    assert not hasattr(connection, fleet.MAKER)
    assert "no calls that are known" in caplog.text
