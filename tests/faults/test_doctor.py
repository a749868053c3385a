"""What ``fedcross doctor --device`` says of a device's key, at a real SuperLink."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from fedcross.core.causes import cause_of
from fedcross.core.trust.keys import make_node_key
from fedcross.deploy.nodes import listing, revoke
from fedcross.engines import flower
from fedcross.server.commands import device_checks
from tests.support.network import Network


@pytest.mark.superlink
def test_a_key_that_is_revoked_or_unknown_is_named(tmp_path: Path) -> None:
    """At Flower's own SuperLink, whose answers tell them apart; asking does not connect the device."""
    keys = tmp_path / "keys"
    make_node_key(keys, "porch")
    with Network(tmp_path / "work", clients=1, superexec=False) as network:
        shutil.copy(network.authority.public, keys / "ca.crt")
        address = f"127.0.0.1:{network.port}"
        (unknown,) = device_checks.check_registered(address, keys)
        assert unknown.kind == "FAULT"
        assert "It was revoked" in unknown.text
        (keys / "porch-node.key").unlink()
        shutil.copy(network.keys[0].private, keys / "one-node.key")
        for _ in range(2):
            (known,) = device_checks.check_registered(address, keys)
            assert (known.kind, "is registered" in known.text) == ("ok", True)
        with contextlib.closing(flower.control_client(network.port, network.authority.public)) as client:
            [node] = listing(client)
            assert node.status == "registered"
            revoke(client, node.key)
        (revoked,) = device_checks.check_registered(address, keys)
        assert revoked.kind == "FAULT"
        assert cause_of(revoked.text).name == cause_of(unknown.text).name == "unknown_key"
