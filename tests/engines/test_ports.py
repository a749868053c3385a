"""A port that a program cannot have is named before the program starts."""

import socket

import pytest

from fedcross.engines import ports


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "*", "", "localhost"])
def test_a_port_that_its_program_would_share_is_taken(host):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port}: Address already in use." in ports.fault(host, port)


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [("127.0.0.1", 0, ""), ("127.0.0.1", 99999, "no such port"), ("192.0.2.7", 0, "an address of this machine")],
)
def test_other_faults_are_not_called_taken(host, port, said):
    found = ports.fault(host, port)
    assert said in found
    assert bool(said) == bool(found)
