"""A real SuperLink whose disk is full: a key that is revoked is shut out all the same."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from fedcross.core.errors import FederationError
from fedcross.deploy import nodes
from fedcross.engines import flower
from fedcross.server.commands import device_checks
from tests.support.disk import can_mount, small_disk
from tests.support.network import Network


@pytest.mark.superlink
@pytest.mark.skipif(not can_mount(), reason="mounts a small disk")
def test_a_key_that_is_revoked_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    with small_disk(tmp_path / "state", "4m") as disk:
        file = disk / "superlink.db"
        with Network(tmp_path / "work", clients=1, superexec=False, database=str(file)) as network:
            thief, address = network.keys[0], f"{flower.LOOPBACK}:{network.port}"
            shutil.copy(network.authority.public, keys / "ca.crt")
            shutil.copy(thief.private, keys / "one-node.key")
            (good,) = device_checks.check_registered(address, keys)
            assert good.kind == "ok"
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            key = nodes.read_public_key(thief.public.read_bytes(), "one")
            with contextlib.closing(flower.control_client(network.port, network.authority.public)) as client:
                with pytest.raises(FederationError, match=r"node \d+: .*cannot be written"):
                    nodes.revoke(client, key)
                (refused,) = device_checks.check_registered(address, keys)
                assert refused.kind == "FAULT"
                (disk / "filler").unlink()
                with contextlib.suppress(FederationError):  # it may have been in the database already
                    nodes.revoke(client, key)
                assert [node.status for node in nodes.listing(client)] == ["unregistered"]
