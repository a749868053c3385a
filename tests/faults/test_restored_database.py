"""A real SuperLink whose database is an older copy: who was revoked since is not let in."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import pytest

from fedcross.core.errors import FederationError
from fedcross.deploy import nodes
from fedcross.engines import flower
from fedcross.server.commands import device_checks, server_checks
from tests.engines.executor.test_barred import copied
from tests.support.network import Network


@pytest.mark.superlink
def test_a_revoked_device_is_not_let_in_by_an_older_database(tmp_path: Path) -> None:
    file, keys = tmp_path / "state" / "superlink.db", tmp_path / "keys"
    file.parent.mkdir()
    keys.mkdir()
    with Network(tmp_path / "work", clients=2, superexec=False, database=str(file)) as network:
        thief, address = network.keys[0], f"{flower.LOOPBACK}:{network.port}"
        shutil.copy(network.authority.public, keys / "ca.crt")
        shutil.copy(thief.private, keys / "one-node.key")
        copy = copied(file, tmp_path / "copy.db")
        with contextlib.closing(flower.control_client(network.port, network.authority.public)) as client:
            key = nodes.read_public_key(thief.public.read_bytes(), "one")
            nodes.revoke(client, key)
        network.stop("superlink", signal.SIGKILL)
        network.processes["superlink"].wait()
        copied(copy, file)
        (open_again,) = server_checks.check_database(file)
        assert open_again.kind == "FAULT"
        network.start_superlink()
        (revoked,) = device_checks.check_registered(address, keys)
        assert (revoked.kind, "It was revoked" in revoked.text) == ("FAULT", True)
        assert "they are revoked again" in (tmp_path / "work" / "superlink-2.log").read_text()
        with contextlib.closing(flower.control_client(network.port, network.authority.public)) as client:
            assert [node.status for node in nodes.listing(client)] == ["unregistered", "registered"]
            with pytest.raises(FederationError, match="a revoked key is never accepted again"):
                nodes.register(client, key)
        server = network.authority.public.parents[1] / "server"
        *good, operator, gateway = server_checks.check_served(address, [server])  # a SuperLink that asks for no token
        assert [one.kind for one in (*good, operator, gateway)] == ["ok", "ok", "FAULT", "FAULT"]
        assert "can start and stop runs" in operator.text
        assert "can call as a device" in gateway.text
        assert [one.kind for one in server_checks.check_database(file)] == ["ok"]
