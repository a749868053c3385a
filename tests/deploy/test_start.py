"""What `fedcross deploy start` checks, and the commands that it becomes."""

import os
import socket

import pytest

from fedcross.deploy import keys, start
from tests.support.command import subcommand

deploy = subcommand("deploy")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    keys.init(tmp_path / "keys", ["client-1", "client-2"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setenv("FEDCROSS_DATA", str(tmp_path))
    return tmp_path / "keys"


@pytest.fixture
def started(monkeypatch):
    """The commands and environments that the process would have become."""
    found = []
    monkeypatch.setattr(os, "execve", lambda path, command, settings: found.append((command, settings)))
    return found


def option(command, name):
    return command[command.index(name) + 1]


def test_the_superlink_takes_registered_devices_only_and_starts_no_app_itself(folder, started, tmp_path):
    database = tmp_path / "superlink.db"
    arguments = ["superlink", "--keys", folder / "server", "--database", database, "--listen", "127.0.0.1:0"]
    assert deploy(["start", *map(str, arguments)]) == 0
    ((command, settings),) = started
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert (option(command, "--isolation"), option(command, "--database")) == ("process", str(database))
    assert settings["FEDCROSS_OPERATOR_FILE"] == str(folder / "server" / keys.OPERATOR)
    assert {settings[name] for name in ("FLWR_TELEMETRY_ENABLED",)} == {"0"}
    assert settings["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_a_device_knows_its_partition_by_its_key(folder, started):
    arguments = ["device", "--keys", folder / "client-2", "--superlink", "fl.example.org:8443", "--port", "0"]
    assert deploy(["start", *map(str, arguments), "--width", "0.4"]) == 0
    ((command, _),) = started
    assert option(command, "--node-config") == "partition-id=1 num-partitions=2 device.width=0.4"
    assert option(command, "--auth-supernode-private-key") == str(folder / "client-2" / "client-2-node.key")
    assert "client-2-node.key" not in " ".join(command).replace(str(folder), "").partition("node-config")[2]


def test_the_superexec_asks_the_superlink(folder, started):
    assert deploy(["start", "superexec", "--keys", str(folder / "server"), "--superlink", "superlink:8000"]) == 0
    assert option(started[0][0], "--runtime-api-address") == "superlink:8000"


@pytest.mark.parametrize(
    ("program", "lost", "told"),
    [
        ("superlink", "server/server.key", "server.key: No such file"),
        ("superlink", "server/superexec.key", "superexec.key: No such file"),
        ("superexec", "server/ca.crt", "ca.crt: No such file"),
        ("gateway", "server/server.crt", "server.crt: No such file"),
        ("device", "client-1/client-1-node.key", "0 files"),
        ("device", "client-1/ca.crt", "ca.crt: No such file"),
    ],
)
def test_a_lost_file_is_named(folder, started, program, lost, told, capsys):
    (folder / lost).unlink()
    place = folder / ("client-1" if program == "device" else "server")
    assert deploy(["start", program, "--keys", str(place), "--superlink", "superlink:8000"]) == 2
    assert told in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("program", ["superlink", "gateway", "device"])
def test_a_taken_port_is_one_line_with_what_to_do(folder, started, program, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place = folder / ("client-1" if program == "device" else "server")
        options = ["--port", str(port)] if program == "device" else ["--listen", f"127.0.0.1:{port}"]
        assert deploy(["start", program, "--keys", str(place), "--superlink", "superlink:8000", *options]) == 1
    said = capsys.readouterr().err
    assert f"port {port}" in said
    assert "choose another" in said
    assert started == []


def test_a_missing_data_folder_is_one_line_with_what_to_do(folder, started, monkeypatch, capsys):
    monkeypatch.setenv("FEDCROSS_DATA", "/nowhere")
    assert deploy(["start", "device", "--keys", str(folder / "client-1"), "--superlink", "gateway:8443"]) == 2
    assert "/nowhere: no such folder" in capsys.readouterr().err


def test_a_certificate_that_expires_soon_is_named_and_starts(folder, started, tmp_path, capsys):
    authority = keys.KeyPair(folder / "authority" / "ca.crt", folder / "authority" / "ca.key")
    keys.make_server(authority, folder / "server", ["localhost"], 13)
    arguments = ["superlink", "--keys", folder / "server", "--database", tmp_path / "d", "--listen", "127.0.0.1:0"]
    assert deploy(["start", *map(str, arguments)]) == 0
    assert "expires in 1" in capsys.readouterr().err
    assert len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["superlink", "--database", "/nowhere/d"], "no folder"),
        (["superexec"], "which SuperLink"),
        (["superlink", "--listen", "8000"], "HOST:PORT"),
    ],
)
def test_wrong_options_are_named(folder, started, arguments, told, capsys):
    assert deploy(["start", arguments[0], "--keys", str(folder / "server"), *arguments[1:]]) == 2
    assert told in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(("limit", "most"), [("4294967296\n", 3221225472), ("max\n", None), (None, None)])
def test_a_serverapp_may_take_three_quarters_of_the_container(tmp_path, monkeypatch, limit, most):
    found = []
    monkeypatch.setattr(start.resource, "setrlimit", lambda kind, limits: found.append(limits))
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    start.limit_memory(tmp_path / "memory.max")
    assert found == ([] if most is None else [(most, most)])
