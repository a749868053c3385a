"""Registers, revokes and lists SuperNode keys at a running SuperLink.

Makes the same calls as ``flwr supernode register/unregister/list``, but an already registered key is no error.
The calls work only from the SuperLink's inner network.
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
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.trust.admission import bound_partition, fingerprint, node_name
from fedcross.engines import flower
from fedcross.engines.remote import host_and_port, refusals, wait_for

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

#: What is said of a node that no partition belongs to, where other keys have one, and where none has.
UNBOUND = "no partition: the server gives it none, as other keys have one"
OWN = "bound to no partition: it has the one that it names"
#: Flower's word for the status of a node whose key is revoked.
REVOKED = "unregistered"
#: A node's number or its key's fingerprint, as the list of nodes shows them.
SHOWN = re.compile(r"[0-9]{1,20}|[0-9a-f]{16}")
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
#: How the SuperLink begins its refusal of a key that a node has, or had before it was revoked.
_USED = "Public key already in use"
#: Status with which the SuperLink says that a key is shut out, but not on record (engines/executor/barred.py).
_UNRECORDED = 507
#: Time limit for the SuperLink's answer, in seconds.
ANSWER_S = 30.0


class RevokedError(FederationError):
    """A key was revoked, so it is never accepted again."""


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


def any_bound(client: ControlHttpClient) -> bool:
    """Return whether a key has a partition: the server gives none to keys without one then."""
    return bound(listing(client))


def bound(known: Sequence[Node]) -> bool:
    """Return whether a key that is not revoked has a partition."""
    return any(one.partition is not None for one in alive(known))


def partition(node: Node, bound: bool) -> str:
    """Return what is said of a node's partition, where one of the keys has one (`bound`) or none has."""
    if node.status == REVOKED:
        return "" if node.partition is None else f"(had partition {node.partition})"
    if node.partition is not None:
        return f"partition {node.partition}"
    return UNBOUND if bound else OWN


def lacks_partition(client: ControlHttpClient, key: bytes) -> bool:
    """Return whether `key`, registered now and for no partition, would get none, as others have one."""
    found = listing(client)
    return all(one.key != key for one in found) and bound(found)


def read_public_key(content: bytes, where: str) -> bytes:
    """Return an OpenSSH public key in the form that Flower stores.

    Raises
    ------
    ConfigError
        If it is no such key, or not on a NIST curve; the message contains `where`, the key's origin.
    """
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    if b"PRIVATE KEY" in content:
        raise ConfigError(f"{where}: this is a private key. It must never leave its device; give the .pub file.")
    try:
        key = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):  # their words repeat the content, which may be a token
        raise ConfigError(f"{where}: this is no OpenSSH public key. Give the device's .pub file.") from None
    if (number := sum(1 for line in content.splitlines() if line.strip())) > 1:
        raise ConfigError(f"{where}: {number} lines, and a device has one key. Give each key a file of its own.")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise ConfigError(f"{where}: a key on a NIST curve is needed. Make one with fedcross deploy new-client.")
    return bytes(public_key_to_bytes(key))


@contextlib.contextmanager
def connect(address: str, authority: Path) -> Iterator[ControlHttpClient]:
    """Yield a client of the SuperLink at `address`; raise its refusals as FederationError with its message."""
    host, port = host_and_port(address)
    wait_for(address, authority, ANSWER_S)
    with contextlib.closing(flower.control_client(port, authority, host)) as client, refusals(address):
        yield client


def listing(client: ControlHttpClient) -> list[Node]:
    """Return all registered nodes."""
    from flwr.proto.control_pb2 import ListNodesRequest

    found = client.ListNodes(ListNodesRequest()).nodes_info
    return [
        Node(int(node.node_id), str(node.status), bytes(node.public_key), bound_partition(node.name)) for node in found
    ]


def register(client: ControlHttpClient, key: bytes, partition: int | None = None) -> tuple[Node, bool]:
    """Register `key`, for `partition` and no other if one is given; return the node and whether it is new.

    A key that was registered for no partition, by an older version, stays so: Flower cannot change it. The node is the
    one that the SuperLink lists afterwards, with the partition that it reads there.

    Raises
    ------
    RevokedError
        If this key was revoked.
    FederationError
        If another key holds the partition, this key was registered for another one, or is not listed then.
    """
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest

    found = listing(client)
    known = alive(found)
    for node in found:
        if node.key == key and node not in known:
            raise _was_revoked(key)
        if node.key == key:
            if partition is not None and node.partition not in (None, partition):
                raise FederationError(
                    f"key {node.fingerprint}: it is registered for partition {node.partition}, and this cannot be "
                    "changed. Revoke it, give the device a new key (fedcross deploy rotate-key) and register that."
                )
            return node, False
    for node in known:
        if partition is not None and node.partition == partition:
            raise FederationError(
                f"partition {partition}: it belongs to key {node.fingerprint} (node {node.node_id}). Choose another "
                "partition. Only if that key is out of use, revoke it, for good, and register this one then."
            )
    name = None if partition is None else node_name(partition)
    try:
        number = int(client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.CONFLICT:  # engines/executor/admitted.py
            raise FederationError(str(error.response.json().get("detail"))) from error
        if _USED not in error.response.text:
            raise
        raise _was_revoked(key) from error
    for node in alive(listing(client)):
        if node.key == key:
            return node, True
    raise FederationError(f"key {fingerprint(key)}: registered as node {number}, and not listed. Is it revoked now?")


def _was_revoked(key: bytes) -> RevokedError:
    return RevokedError(
        f"key {fingerprint(key)}: it was revoked, and a revoked key is never accepted again. Give the device a new "
        "one (fedcross deploy rotate-key) and register that."
    )


def revoke(client: ControlHttpClient, key: bytes) -> int:
    """Revoke the node with `key`; return its id. The SuperLink refuses its next call and never accepts the key again.

    Raises
    ------
    FederationError
        If no node has this key, or the SuperLink shut it out, but cannot write that down.
    """
    import httpx
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    found = [node for node in listing(client) if node.key == key]
    for node in alive(found):
        try:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != _UNRECORDED:
                raise
            raise FederationError(f"node {node.node_id}: {error.response.json().get('detail')}") from error
        return node.node_id
    why = "It was revoked already." if found else "Was another one registered? See fedcross deploy nodes."
    raise FederationError(f"key {fingerprint(key)}: no registered node has it. {why}")


def called(client: ControlHttpClient, name: str) -> Node:
    """Return the registered node that :func:`listing` shows with this number or fingerprint.

    Raises
    ------
    FederationError
        If there is none, or the name is the number of one node and the fingerprint of another.
    """
    found = [node for node in listing(client) if name in (str(node.node_id), node.fingerprint)]
    here = alive(found)
    if len(here) > 1:
        numbers = " and ".join(str(node.node_id) for node in here)
        raise FederationError(f"nodes {numbers} are meant. Give the .pub file of the one, or its other name.")
    if not here:
        why = "It was revoked already." if found else "See fedcross deploy nodes."
        raise FederationError(f"no registered node has this number or fingerprint. {why}")
    return here[0]


def alive(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are not revoked."""
    return [node for node in nodes if node.status != REVOKED]
