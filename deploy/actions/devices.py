"""The actions of ``fedcross deploy`` about devices: their bundles and keys, and who is admitted."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, FederationError, StorageError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

    from fedcross.deploy.nodes import Node


#: What is said of a new key without a partition, where others have one.
NEEDED = (
    "not registered: other keys have a partition, so the server would give this one none, and that cannot be changed "
    "later. Give --partition N (fedcross deploy nodes lists those that are taken); or --no-partition, for a device "
    "that takes part in no run of fedcross."
)


def new_client(arguments: argparse.Namespace) -> None:
    """Make the bundle of a device."""
    from fedcross.deploy.device import Device, registration
    from fedcross.deploy.device import new_client as make

    device = Device(arguments.name, arguments.superlink, arguments.partition, arguments.partitions, arguments.width)
    bundle = make(device, arguments.authority, arguments.folder)
    print(f"{bundle}: take this folder to the device; its keys are secret")
    print(f"{bundle}/keys/{device.name}-node.pub: take this file to the server, and there: {registration(device)}")
    print(
        f"(a server without containers: fedcross deploy register --partition {device.partition} {device.name}-node.pub)"
    )


def rotate_key(arguments: argparse.Namespace) -> None:
    """Give a device a new key, or only a new secret."""
    from fedcross.deploy.device import new_secret
    from fedcross.deploy.device import rotate_key as rotate

    if arguments.secret:
        print(f"{new_secret(arguments.bundle)} (secret)\nThe key stays. Start the device again.")
        return
    new, old, other = rotate(arguments.bundle)
    if not (authority := new.with_name("ca.crt")).exists():
        print(f"{authority}: missing. Copy the federation's ca.crt there.")
    if not old.exists():
        print(
            "The old public key is lost too: at the server, fedcross deploy nodes lists it, and fedcross deploy revoke "
            f"takes its number\n{new}: register it then, with the same --partition\nThen start the device again."
        )
        return
    earlier = "" if old.name.endswith("-old.pub") else " (or the one beside it that nodes lists for its partition)"
    first = f"{old}: revoke it{earlier}"
    if other is not None:
        files = [f"{file} ({_fingerprint(file)})" for file in (old, other)]
        first = (
            f"{new.name} held another key than {new.stem}.key. Both are kept: {files[0]} is the private key's own, "
            f"{files[1]} the file's. One may be another device's: revoke the one that fedcross deploy nodes lists for "
            "this device's partition, and not the other"
        )
    print(f"{first}\n{new}: register it then, with the same --partition\nThen start the device again.")


def _fingerprint(public: Path) -> str:
    """Return the fingerprint of a key in a file, as ``nodes`` lists it."""
    from fedcross.core.trust.admission import fingerprint

    [(_, key)] = public_keys([str(public)])
    return fingerprint(key)


def register(arguments: argparse.Namespace) -> None:
    """Admit devices; one that is refused keeps none of the others out."""
    from fedcross.core.trust.admission import LAST_PARTITION
    from fedcross.deploy.nodes import RevokedError, any_bound, lacks_partition

    partitions: list[int | None] = list(arguments.partition) or [None] * len(arguments.keys)
    bindable = all(one is None or 0 <= one <= LAST_PARTITION for one in partitions)
    if len(partitions) != len(arguments.keys) or not bindable:
        raise ConfigError(
            f"--partition {' --partition '.join(map(str, partitions))}: give one number from 0 to {LAST_PARTITION} for "
            f"each of the {len(arguments.keys)} keys, in their order, or none at all."
        )
    keys = list(public_keys(arguments.keys))  # a bad file shows before the wait for the server
    refused: list[str] = []
    unbound: list[tuple[str, Node, int]] = []
    with _connected(arguments) as client:
        for (name, key), partition in zip(keys, partitions):
            try:
                if partition is None and not arguments.no_partition and lacks_partition(client, key):
                    raise FederationError(NEEDED)
                node = _admit(client, name, key, partition)
            except RevokedError as error:
                if arguments.skip_revoked:
                    print(f"{name}: left out: {error}", file=sys.stderr)
                else:
                    refused.append(f"{name}: {error}")
            except FederationError as error:
                refused.append(f"{name}: {error}")
            else:
                if partition is not None and node.partition is None:
                    unbound.append((name, node, partition))
                if arguments.no_partition and node.partition is not None:
                    refused.append(
                        f"{name}: node {node.node_id} keeps partition {node.partition}: that cannot be taken off a key."
                    )
        others_bound = bool(unbound) and any_bound(client)
    if others_bound or not arguments.skip_revoked:  # a start is not held up by keys that an older version registered
        why = "Other keys have one, so the server gives it none" if others_bound else "To bind the device to one"
        refused += (
            f"{name}: node {node.node_id} was registered without a partition, and this cannot be changed. {why}: "
            "revoke it, give the device a new key (fedcross deploy rotate-key) and register that with --partition "
            f"{partition}."
            for name, node, partition in unbound
        )
    if refused:
        raise FederationError("\n".join(refused))


def _admit(client: ControlHttpClient, name: str, key: bytes, partition: int | None) -> Node:
    """Register a key and say so; return the node, which has no partition if it was registered before without one."""
    from fedcross.deploy import nodes

    node, new = nodes.register(client, key, partition)
    if partition is not None and node.partition is None:
        said = f"not bound to partition {partition}: it needs a new key for that (see rotate-key)"
    else:
        said = nodes.partition(node, node.partition is not None or nodes.any_bound(client))
    print(f"{name}: node {node.node_id}, {said}{'' if new else ', already registered'}")
    return node


def revoke(arguments: argparse.Namespace) -> None:
    """Shut devices out: those with a public key, a number or a fingerprint; a bad name keeps none of the others in.

    A file of the same name comes before a number or fingerprint.
    """
    from fedcross.deploy.nodes import SHOWN, called
    from fedcross.deploy.nodes import revoke as shut_out

    keys: dict[str, bytes | None] = {}  # None: a number or a fingerprint
    unread, refused = [], []
    for name in dict.fromkeys(arguments.keys):
        try:
            shown = SHOWN.fullmatch(name) and not Path(name).exists()
            keys |= {name: None} if shown else dict(public_keys([name]))
        except (StorageError, ConfigError) as error:
            unread.append(str(error))
    if keys:
        with _connected(arguments) as client:
            for name, key in keys.items():
                try:
                    print(f"{name}: node {shut_out(client, key or called(client, name).key)} is revoked")
                except FederationError as error:
                    refused.append(f"{name}: {error}")
    if unread:
        raise StorageError("\n".join(unread + refused))
    if refused:
        raise FederationError("\n".join(refused))


def nodes(arguments: argparse.Namespace) -> None:
    """List the devices that the SuperLink knows."""
    from fedcross.deploy.nodes import REVOKED, bound, listing, partition

    with _connected(arguments) as client:
        known = listing(client)
    for node in known:
        status = "revoked" if node.status == REVOKED else node.status
        print(f"{node.node_id:>20}  {status:<12}  {node.fingerprint}  {partition(node, bound(known))}".rstrip())


def public_keys(names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and key of each file; ``-`` is standard input.

    Raises
    ------
    ConfigError
        If it is no public key, or its name is no file's, but perhaps a file's content, which no message repeats.
    StorageError
        If it cannot be read.
    """
    from fedcross.deploy.nodes import read_public_key

    for name in names:
        if not name.isprintable():
            raise ConfigError(
                f"A name of {len(name)} characters has a line break or the like. Give a file's name, not its content."
            )
        try:
            content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as error:
            raise StorageError(f"{name}: this key cannot be read ({error.strerror}).") from error
        yield name, read_public_key(content, name)


@contextlib.contextmanager
def _connected(arguments: argparse.Namespace) -> Iterator[ControlHttpClient]:
    """Yield a client of the SuperLink in the options; raise its refusals as errors with its message."""
    if not arguments.superlink or not arguments.authority:
        raise ConfigError("Which SuperLink? Give --superlink HOST:PORT and --authority ca.crt.")
    from fedcross.deploy.nodes import connect

    with connect(arguments.superlink, Path(arguments.authority)) as client:
        yield client
