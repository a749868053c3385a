from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME

from fedcross.conf.cross_checks import remarks
from fedcross.conf.schema import load
from fedcross.core.trust.keys import KeyPair, make_node_key
from fedcross.engines import guarded, superlink
from fedcross.engines.executor import program


def test_superlink_is_closed_by_tls_and_node_keys_and_leaves_no_state(tmp_path: Path) -> None:
    command = superlink.superlink_command(
        8443,
        KeyPair(tmp_path / "s.crt", tmp_path / "s.key"),
        tmp_path / "ca.crt",
        tmp_path / "secret",
    )
    assert command[:4] == guarded.command("flower-superlink")
    options = dict(itertools.pairwise(command))
    assert options["--host"] == "127.0.0.1"
    assert options["--port"] == "8443"
    assert options["--ssl-certfile"] == f"{tmp_path}/s.crt"
    assert options["--ssl-keyfile"] == f"{tmp_path}/s.key"
    assert options["--ssl-ca-certfile"] == f"{tmp_path}/ca.crt"
    assert options["--database"] == FLWR_IN_MEMORY_DB_NAME
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert "--insecure" not in command
    # Without the secret, every local user could take the run's task, with its code and configuration.
    assert options["--isolation"] == "process"
    assert options["--superexec-auth-secret-file"] == f"{tmp_path}/secret"


def test_superexec_has_the_secret_and_prepares_a_process_for_one_run(tmp_path: Path) -> None:
    command = superlink.superexec_command(8443, tmp_path / "ca.crt", tmp_path / "secret")
    assert command[:2] == ["env", "FEDCROSS_READY=once"]
    assert command[2:6] == guarded.command("flower-superexec")
    assert dict(zip(command[6::2], command[7::2], strict=True)) == {
        "--runtime-api-address": "127.0.0.1:8443",
        "--root-certificates": f"{tmp_path}/ca.crt",
        "--superexec-auth-secret-file": f"{tmp_path}/secret",
    }


def test_supernode_knows_its_partition(tmp_path: Path) -> None:
    key = KeyPair(tmp_path / "n.pub", tmp_path / "n.key")
    command = superlink.supernode_command(8443, 9001, tmp_path / "ca.crt", key, 2, 5, tmp_path / "secret")
    executor, node = command[: command.index("--")], command[command.index("--") + 1 :]
    assert executor == [*program.command("supervisor"), "--port", "9001", "--secret", f"{tmp_path}/secret"]
    options = dict(zip(node[1::2], node[2::2], strict=True))
    assert options == {
        "--superlink": "127.0.0.1:8443",
        "--root-certificates": f"{tmp_path}/ca.crt",
        "--auth-supernode-private-key": f"{tmp_path}/n.key",
        "--host": "127.0.0.1",
        "--port": "9001",
        "--isolation": "process",
        "--superexec-auth-secret-file": f"{tmp_path}/secret",
        "--node-config": "partition-id=2 num-partitions=5",
    }


def test_registration_sends_the_key_in_the_form_the_superlink_stores(tmp_path: Path) -> None:
    requests = []

    class Control:
        def RegisterNode(self, request: object) -> object:
            requests.append(request)
            return type("Reply", (), {"node_id": 7})()

    node = make_node_key(tmp_path / "nodes", "pi-1")
    assert superlink.register(Control(), node) == 7  # type: ignore[arg-type]
    assert requests[0].public_key.startswith(b"-----BEGIN PUBLIC KEY-----")  # type: ignore[attr-defined]


def test_run_hands_the_job_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(superlink, "launch", lambda *arguments: seen.extend(arguments))
    job = type("J", (), {"app_folder": tmp_path, "overrides": "a=1", "clients": 3, "output": tmp_path / "out"})()
    superlink.run(job)
    assert seen == [tmp_path, "a=1", 3, tmp_path / "out" / "engine"]


def test_params_have_no_settings() -> None:
    assert superlink.Params().model_dump() == {"name": "superlink"}
    with pytest.raises(ValueError, match="Extra inputs"):
        superlink.Params.model_validate({"port": 1})


@pytest.mark.parametrize(("clients", "cores", "warned"), [(20, 2, True), (8, 2, False), (20, 5, False), (5, 1, True)])
def test_far_more_supernodes_than_cores_are_told_before_they_start(
    monkeypatch: pytest.MonkeyPatch, clients: int, cores: int, warned: bool
) -> None:
    monkeypatch.setattr(superlink, "cores", lambda: cores)
    config = load(["engine=superlink", f"partition.clients={clients}", "clients_per_round=3"])
    told = [one for one in remarks(config) if one.startswith(f"engine=superlink: {clients} SuperNodes, one for each")]
    assert bool(told) == warned
    assert not [one for one in remarks(load([f"partition.clients={clients}", "clients_per_round=3"])) if "Super" in one]
