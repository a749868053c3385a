"""A port that a program cannot have is named before the program starts."""

import socket

import pytest

from fedcross.core import ports


@pytest.fixture
def shared():
    """Return a port of a program that would share it with others, as HAProxy does by itself."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "*", "", "localhost"])
def test_a_shared_port_is_taken(shared, host):
    said = ports.fault(host, shared)
    assert said == f"port {shared}: Address already in use. Stop the program that uses it, or choose another port."


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [("127.0.0.1", 0, ""), ("127.0.0.1", 99999, "no such port"), ("192.0.2.7", 0, "an address of this machine")],
)
def test_other_faults_are_not_called_taken(host, port, said):
    found = ports.fault(host, port)
    assert said in found
    assert bool(said) == bool(found)
