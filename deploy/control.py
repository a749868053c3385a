"""Registers, revokes and lists SuperNode keys at a running SuperLink, over its Control API.

The calls work only from the SuperLink's inner network and with the operator's token.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.settings import bound_partition, fingerprint, node_name
from fedcross.engines import flower
from fedcross.engines.remote import host_and_port, refusals, wait_for

if TYPE_CHECKING:
    from fedcross.engines.flower_private import ControlHttpClient

#: Flower's status of a node whose key is revoked.
REVOKED = "unregistered"
#: Time limit for the SuperLink's answer, in seconds.
ANSWER_S = 30.0


@dataclass(frozen=True)
class Node:
    """A SuperNode as the SuperLink knows it; `partition` is the one that its key was registered for."""

    node_id: int
    status: str
    key: bytes
    partition: int | None = None

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the key's SHA-256."""
        return fingerprint(self.key)

    @property
    def names(self) -> tuple[str, ...]:
        """What the operator may call it."""
        return (str(self.node_id), self.fingerprint, *([] if self.partition is None else [node_name(self.partition)]))


@contextlib.contextmanager
def connect(address: str | None, authority: str | None) -> Iterator[ControlHttpClient]:
    """Yield a client of the SuperLink at `address`; raise its refusals as FederationError."""
    if not address or not authority:
        raise ConfigError("Which SuperLink? Give --superlink HOST:PORT and --authority ca.crt.")
    host, port = host_and_port(address)
    wait_for(address, Path(authority), ANSWER_S)
    with contextlib.closing(flower.control_client(port, Path(authority), host)) as client, refusals(address):
        yield client


def read_public_key(path: Path) -> tuple[bytes, int | None]:
    """Return the key of an OpenSSH file in the form that Flower stores, and the partition that its comment names.

    Raises
    ------
    ConfigError
        If there is no public key on a NIST curve in the file.
    """
    try:
        content = path.read_bytes()
        key = load_ssh_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm):  # their words can repeat a private key
        raise ConfigError(f"{path}: no readable OpenSSH public key. Name the device's NAME-node.pub.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path}: not a key on a NIST curve. Make one: fedcross deploy add-device.")
    named = re.search(rb"partition-\d+", content)
    partition = bound_partition(named[0].decode()) if named else None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), partition


def listing(client: ControlHttpClient) -> list[Node]:
    """Return all nodes, revoked ones included."""
    from fedcross.engines.flower_private import control_pb2

    found = client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
    return [
        Node(int(node.node_id), str(node.status), bytes(node.public_key), bound_partition(node.name)) for node in found
    ]


def alive(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are not revoked."""
    return [node for node in nodes if node.status != REVOKED]


def register(client: ControlHttpClient, key: bytes, partition: int | None) -> bool:
    """Register `key` for `partition`; return False if it is registered for that already.

    Raises
    ------
    FederationError
        If the key was revoked or has another partition, or another key has the partition.
    """
    from fedcross.engines.flower_private import control_pb2

    for node in listing(client):
        if node.key == key and node.status == REVOKED:
            raise FederationError(
                f"key {node.fingerprint}: it was revoked, and a revoked key is never accepted again. Make a new one: "
                "fedcross deploy add-device."
            )
        if node.key == key:
            if node.partition != partition:
                raise FederationError(f"key {node.fingerprint}: registered for partition {node.partition}. Revoke it.")
            return False
        if partition is not None and node.partition == partition and node.status != REVOKED:
            raise FederationError(
                f"partition {partition}: it belongs to key {node.fingerprint}. Choose another partition or revoke that."
            )
    client.RegisterNode(
        control_pb2.RegisterNodeRequest(public_key=key, name="" if partition is None else node_name(partition))
    )
    return True


def revoke(client: ControlHttpClient, name: str) -> Node:
    """Revoke a node for good and return it; the SuperLink refuses its next call.

    Parameters
    ----------
    client : ControlHttpClient
        From :func:`connect`.
    name : str
        The node's id, fingerprint or ``partition-N``, or its public key's file.
    """
    from fedcross.engines.flower_private import control_pb2

    known = alive(listing(client))
    if name.endswith(".pub"):
        key, _ = read_public_key(Path(name))
        found = [node for node in known if node.key == key]
    else:
        found = [node for node in known if name in node.names]
    if len(found) != 1:
        raise FederationError(f"{name}: {len(found)} registered devices have this name. See fedcross deploy status.")
    client.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=found[0].node_id))
    return found[0]
