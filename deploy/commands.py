"""The actions of ``fedcross deploy``; :mod:`server.commands.deploy` defines their command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core import ports
from fedcross.core.errors import ConfigError, FederationError, StorageError, quoted
from fedcross.core.exposed import check_owner
from fedcross.core.private_files import alone, check_place
from fedcross.core.trust import certificates, issued, lasting, revoked, signing
from fedcross.core.trust.keys import KeyPair, make_node_key
from fedcross.deploy import authorities, restarts, start
from fedcross.engines import guarded
from fedcross.engines.remote import host_and_port

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

Arguments = argparse.Namespace


def new_client(arguments: Arguments) -> None:
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


def rotate_key(arguments: Arguments) -> None:
    """Give a device a new key, or only a new secret."""
    from fedcross.deploy.device import new_secret
    from fedcross.deploy.device import rotate_key as rotate

    if arguments.secret:
        print(f"{new_secret(arguments.bundle.resolve())} (secret)\nThe key stays. Start the device again.")
        return
    new, old, other = rotate(arguments.bundle.resolve())
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


def register(arguments: Arguments) -> None:
    """Admit devices; one that is refused keeps none of the others out."""
    from fedcross.deploy.nodes import RevokedError, any_bound

    partitions: list[int | None] = list(arguments.partition) or [None] * len(arguments.keys)
    if len(partitions) != len(arguments.keys) or any(one is not None and one < 0 for one in partitions):
        raise ConfigError(
            f"--partition {' --partition '.join(map(str, partitions))}: give one number from 0 for each of the "
            f"{len(arguments.keys)} keys, in their order, or none at all."
        )
    keys = list(public_keys(arguments.keys))  # a bad file shows before the wait for the server
    refused: list[str] = []
    unbound: list[tuple[str, int, int]] = []
    with _connected(arguments) as client:
        for (name, key), partition in zip(keys, partitions):
            try:
                number = _admit(client, name, key, partition)
            except RevokedError as error:
                if arguments.skip_revoked:
                    print(f"{name}: left out: {error}", file=sys.stderr)
                else:
                    refused.append(f"{name}: {error}")
            except FederationError as error:
                refused.append(f"{name}: {error}")
            else:
                unbound += [] if number is None or partition is None else [(name, number, partition)]
        others_bound = bool(unbound) and any_bound(client)
    if others_bound:
        refused += (
            f"{name}: node {number} was registered without a partition, and this cannot be changed. Other keys "
            "have one, so the server gives it none: revoke it, give the device a new key (fedcross deploy "
            f"rotate-key) and register that with --partition {partition}."
            for name, number, partition in unbound
        )
    if refused:
        raise FederationError("\n".join(refused))


def _admit(client: ControlHttpClient, name: str, key: bytes, partition: int | None) -> int | None:
    """Register a key and say so; return the node's number if it was registered before without this `partition`."""
    from fedcross.deploy.nodes import UNBOUND
    from fedcross.deploy.nodes import register as admit

    node, new = admit(client, key, partition)
    bound = f", {UNBOUND}" if node.partition is None else f", partition {node.partition}"
    lacks = partition is not None and node.partition is None
    if lacks:
        bound = f", not bound to partition {partition}: it needs a new key for that (see rotate-key)"
    print(f"{name}: node {node.node_id}{bound}{'' if new else ', already registered'}")
    return node.node_id if lacks else None


def revoke(arguments: Arguments) -> None:
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


def nodes(arguments: Arguments) -> None:
    """List the devices that the SuperLink knows."""
    from fedcross.deploy.nodes import UNBOUND, listing

    with _connected(arguments) as client:
        for node in listing(client):
            bound = UNBOUND if node.partition is None else f"partition {node.partition}"
            print(f"{node.node_id:>20}  {node.status:<12}  {node.fingerprint}  {bound}")


def public_keys(names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and key of each file; ``-`` is standard input."""
    from fedcross.deploy.nodes import read_public_key

    for name in names:
        try:
            content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as error:
            raise StorageError(f"{name}: this key cannot be read ({error.strerror}).") from error
        yield name, read_public_key(content, name)


@contextlib.contextmanager
def _connected(arguments: Arguments) -> Iterator[ControlHttpClient]:
    """Yield a client of the SuperLink in the options; raise its refusals as errors with its message."""
    if not arguments.superlink or not arguments.authority:
        raise ConfigError("Which SuperLink? Give --superlink HOST:PORT and --authority ca.crt.")
    from fedcross.deploy.nodes import connect

    with connect(arguments.superlink, Path(arguments.authority)) as client:
        yield client


def authority(arguments: Arguments) -> None:
    """Make the authority."""
    check_place(arguments.folder.parent)
    found = sorted(arguments.folder.parent.glob("*/ca.crt"))
    copies = [path for path in found if path.parent != arguments.folder and not path.with_name("ca.key").exists()]
    _tell(signing.make_authority(arguments.folder, arguments.days))
    if copies:
        print(
            f"{copies[0]} is of another authority: devices that trust that one are locked out until they get the new "
            "ca.crt",
            file=sys.stderr,
        )


def server(arguments: Arguments) -> None:
    """Make the server's certificate, with the names by which the federation's own parts reach it too."""
    from fedcross.deploy.federation import INNER_NAMES, gateway_token

    root, before = _root(arguments.authority), (arguments.folder / "server.key").exists()
    check_place(arguments.folder.parent)
    authorities.refuse_mixed(root.public, arguments.folder)
    names = [*arguments.names, *INNER_NAMES]
    with alone(arguments.authority):  # federation, which renews this pair too, waits
        _tell(signing.make_server(root, arguments.folder, names, arguments.days))
        tokens = gateway_token(arguments.folder)
        for made in tokens:
            print(f"{made} (secret)")
    if before:
        files = [str(arguments.folder / "server.key"), *tokens]
        print(restarts.line([restarts.SUPERLINK, restarts.GATEWAY], files), file=sys.stderr)


def client(arguments: Arguments) -> None:
    """Make a client certificate."""
    root = _root(arguments.authority)
    check_place(arguments.folder.parent)
    _tell(signing.make_client(root, arguments.folder, arguments.name, arguments.days))


def revoke_certificate(arguments: Arguments) -> None:
    """Put certificates on the authority's revocation list; one that cannot be keeps none of the others off it."""
    from fedcross.deploy.revocation import is_recorded
    from fedcross.deploy.revocation import revoke as put_on_list

    files: list[Path | None] = list(arguments.files) or [None]
    faults = []
    for file in files:
        try:
            recorded = file is None or is_recorded(file, arguments.authority)  # revoking records it
            path, new = put_on_list(_root(arguments.authority), file)
        except StorageError as error:
            faults.append(str(error))
            continue
        said = f"(all unexpired ones of its device in {issued.FILE})"
        if not new:
            said = "(it was before; what its device got since is valid)"
        elif not recorded:
            said = (
                f"({issued.FILE} did not have it, so it may lack others of its device too: revoke each of them by its "
                "own file)"
            )
        print(path if file is None else f"{path}: newly revoked with {file}: {new} {said}")
    _raise(faults)


def node(arguments: Arguments) -> None:
    """Make a SuperNode's key pair."""
    _tell(make_node_key(arguments.folder, arguments.name))


def check(arguments: Arguments) -> None:
    """Check certificates, keys and lists of revoked certificates."""
    faults = []
    for path in arguments.files:
        try:
            print(f"{path}: {_state(path, arguments.authority, arguments.files)}")
        except StorageError as error:
            faults.append(str(error))
    _raise(faults)


def _state(path: Path, authority: Path, files: Sequence[Path]) -> str:
    """Return what is to say of a good file; `files` are all that are checked, a key's certificate among them."""
    from fedcross.deploy.revocation import check_list, check_revoked

    if path.suffix == ".key":
        check_owner(certificates.check_key(path, [file for file in files if file.name == f"{path.stem}.crt"]))
        return "private"
    early = start.SOON
    if path.suffix == ".crl":
        left, cure = check_list(path, authority), "sign it again with fedcross deploy revoke-certificate"
        revoked.refuse_earlier(path, [file for file in files if file.suffix == ".crl" and file != path])
    else:
        left, cure = certificates.check_certificate(path, authority), lasting.renewal(path, authority)
        certificates.refuse_private(path)
        check_revoked(path, authority)
        early = lasting.soon(path, early)
    return f"{left.days} days left{f', {cure}' if left < early else ''}"


def _raise(faults: Sequence[str]) -> None:
    """Raise what was found in several files as one error, each fault once."""
    if faults:
        raise StorageError("\n".join(dict.fromkeys(faults)))


def federation(arguments: Arguments) -> None:
    """Make all missing keys and certificates."""
    from fedcross.deploy.federation import prepare

    names = [name.strip() for name in arguments.names.split(",") if name.strip()]
    made = prepare(arguments.folder, arguments.device, names)
    print("\n".join(made or ["nothing to do"]))
    for line in restarts.after(arguments.folder, made):
        print(line, file=sys.stderr)


def kubernetes(arguments: Arguments) -> None:
    """Write the federation as Kubernetes manifests."""
    from fedcross.deploy.kubernetes.manifests import write
    from fedcross.deploy.kubernetes.plan import Plan, read_bundle, read_settings

    plan = Plan(
        arguments.keys,
        tuple(map(read_bundle, arguments.device)),
        read_settings(arguments.env, os.environ),
        arguments.namespace,
        arguments.sample,
    )
    print("\n".join(map(str, write(plan, arguments.folder))))
    print(f"The secrets among them are private keys. Then: kubectl apply -f {quoted(arguments.folder)}")


def sample(arguments: Arguments) -> None:
    """Write sample data."""
    from fedcross.deploy.sample import write

    os.umask(0o022)
    print("\n".join(map(str, write(arguments.folder, arguments.devices))) or "nothing to do")


def superlink(arguments: Arguments) -> None:
    """Become the SuperLink."""
    command = start.superlink(arguments.keys, arguments.secret, arguments.database, arguments.host)
    os.environ.update(start.gateway_of(arguments.keys))
    ports.check(arguments.host, start.SUPERLINK_PORT, f"--host {arguments.host}", "address")
    start.replace_process(command)


def gateway(arguments: Arguments) -> None:
    """Become the gateway, HAProxy."""
    from fedcross.deploy.gateway import prepare

    ports.check(*host_and_port(arguments.listen), f"--listen {arguments.listen}")
    start.replace_process(prepare(arguments.keys, arguments.work, arguments.superlink, arguments.listen))


def superexec(arguments: Arguments) -> None:
    """Become the SuperExec."""
    if arguments.memory:
        start.limit_memory(arguments.memory)
    if arguments.runs is not None:
        os.environ[guarded.RUNS] = str(arguments.runs)
    try:
        guarded.most_runs(os.environ.get(guarded.RUNS))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    command = start.superexec(arguments.keys, arguments.superlink, arguments.health)
    ports.check(*host_and_port(arguments.health), f"--health {arguments.health}")
    # The user who starts a run must be able to read its files: group and others get read access.
    start.replace_process(command, umask=0o002)


def supernode(arguments: Arguments) -> None:
    """Become a device: a SuperNode and what answers its messages."""
    own = (arguments.partition, arguments.partitions, arguments.port, arguments.width)
    command = start.supernode(arguments.keys, arguments.name, arguments.superlink, *own)
    ports.check("127.0.0.1", arguments.port, f"--port {arguments.port}")
    start.replace_process(command)


def _root(folder: Path) -> KeyPair:
    return KeyPair(folder / "ca.crt", folder / "ca.key")


def _tell(pair: KeyPair) -> None:
    print(f"{pair.public}\n{pair.private} (secret)")
