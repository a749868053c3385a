"""Another user of the server's machine calls a real SuperLink past the gateway, with nothing that proves anything."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from pathlib import Path

import pytest

from fedcross.engines.executor import punctual
from tests.support.network import Network

pytestmark = [pytest.mark.superlink, pytest.mark.slow, pytest.mark.usefixtures("warm_start")]
MIB = 1 << 20
#: Bytes of a body, how many are sent at once, and what the SuperLink's memory may grow by.
BODY, AT_ONCE, GROWTH = 64 * MIB, 6, 32 * MIB
PATHS = ("/v1/runtime/push-object", "/v1/runtime/acquire-task", "/v1/runtime/responses", "/v1/runtime/push-logs")
PATIENCE_S = 120


def peak(network: Network) -> int:
    found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{network.processes['superlink'].pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def connected(network: Network) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(network.authority.public))
    link = socket.create_connection(("127.0.0.1", network.port), PATIENCE_S)
    return context.wrap_socket(link, server_hostname="127.0.0.1")


def closed(link: ssl.SSLSocket) -> bool:
    """Return whether the other side closes the connection, whatever it says before."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while link.recv(4096):
            pass
    return True  # else the time is over: TimeoutError


def test_large_bodies_of_strangers_are_not_read_and_idle_connections_do_not_stay(tmp_path: Path) -> None:
    head = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\ncontent-length: {}\r\n"
    token = "flwr-task-token: " + "0123456789abcdef" * 16
    with Network(tmp_path, clients=1, superexec=False) as network:
        with connected(network) as link:
            link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in link.recv(4096)
        before = peak(network)
        for path in PATHS:
            links = [connected(network) for _ in range(AT_ONCE)]
            for number, link in enumerate(links):
                told = head.format(path, BODY) + (f"{token}\r\n" if number % 2 else "")
                link.sendall(told.encode() + b"\r\n")
            for _ in range(BODY // MIB):
                for link in links:
                    with contextlib.suppress(OSError):
                        link.sendall(bytes(MIB))
            for link in links:
                assert closed(link)
                link.close()
        grown = peak(network) - before
        print(f"the SuperLink's memory grew by {grown / MIB:.0f} MiB")
        assert grown < GROWTH
        idle = [connected(network) for _ in range(punctual.MOST + 50)]
        assert all(closed(link) for link in idle)
        for link in idle:
            link.close()
        log = (network.work / "superlink-1.log").read_text()
    assert log.count("calls refused unread") <= 2
    assert "push-object" not in log
