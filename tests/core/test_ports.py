"""A port that a program cannot have is named before the program starts."""

import os
import socket

import pytest

from fedcross.core import ports
from fedcross.core.causes import PAGE, cause_of
from fedcross.deploy import start
from fedcross.deploy.federation import prepare
from tests.support.command import subcommand

deploy = subcommand("deploy")


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
    assert cause_of(said).name == "port_taken"


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [("127.0.0.1", 0, ""), ("127.0.0.1", 99999, "no such port"), ("192.0.2.7", 0, "an address of this machine")],
)
def test_other_faults_are_not_called_taken(host, port, said):
    found = ports.fault(host, port)
    assert said in found
    assert bool(said) == bool(found)
    assert cause_of(found) is None


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    prepare(folder, ["porch"])
    return folder


def test_a_database_in_no_folder_is_told_before_the_superlink_starts(keys, tmp_path, capsys):
    command = ["superlink", keys / "server", "--secret", keys / "superexec", "--database", tmp_path / "none" / "d"]
    assert deploy(list(map(str, command))) == 2
    assert f"{tmp_path}/none is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["superlink", "superexec", "gateway", "supernode"])
def test_no_program_starts_on_a_taken_port(keys, tmp_path, shared, program, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(os, "execve", lambda *command: started.append(command))
    monkeypatch.setattr(start, "SUPERLINK_PORT", shared)
    place = f"127.0.0.1:{shared}"
    options = {
        "superlink": [keys / "server", "--secret", keys / "superexec", "--database", tmp_path / "d"],
        "superexec": [keys / "superexec", "--superlink", "127.0.0.1:1", "--health", place],
        "gateway": [keys / "server", "--work", tmp_path / "work", "--listen", place],
        "supernode": [keys / "porch", "--name=porch", "--superlink=127.0.0.1:1", "--partition=0"],
    }[program]
    more = ["--partitions=1", f"--port={shared}"] if program == "supernode" else []
    assert deploy([program, *map(str, options), *more]) == 1
    said = capsys.readouterr().err
    assert f"port {shared}: Address already in use" in said
    assert said.splitlines()[-1] == f"Cause: port_taken ({PAGE})"
    assert (started, (tmp_path / "work").exists()) == ([], False)
