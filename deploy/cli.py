"""The ``fedcross-deploy`` command: keys, certificates and programs of a federation.

::

    fedcross-deploy new-client --superlink fl.example.org:8443 --partition 3 --partitions 4 ca.crt devices porch
    fedcross-deploy register   porch-node.pub          # at the server
    fedcross-deploy revoke     porch-node.pub
    fedcross-deploy nodes
    fedcross-deploy authority  keys/ca
    fedcross-deploy server     keys/ca keys/server superlink.example.org 192.0.2.7
    fedcross-deploy check      keys/ca/ca.crt keys/server/server.crt keys/server/server.key
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import certificates, start
from deploy.certificates import AUTHORITY_DAYS, MAX_LEAF_DAYS, KeyPair
from deploy.files import check_private
from tasks.errors import ConfigError, FedcrossError, StorageError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

Arguments = argparse.Namespace
#: Where the commands at the server find it, so that they need not be told.
SUPERLINK = "FEDCROSS_SUPERLINK"
AUTHORITY = "FEDCROSS_AUTHORITY"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 1 if the SuperLink refuses, 2 for wrong use or unusable files."""
    os.umask(0o077)
    arguments = _parser().parse_args(argv)
    command: Callable[[Arguments], None] = arguments.command
    try:
        command(arguments)
    except FedcrossError as error:
        print(f"fedcross-deploy: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedcross-deploy", description="Keys, certificates and programs of a federation (see docs/deploy.md)."
    )
    parts = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[Arguments], None], text: str) -> argparse.ArgumentParser:
        part: argparse.ArgumentParser = parts.add_parser(name, help=text, description=text)
        part.set_defaults(command=command)
        return part

    _device_parts(add)
    _certificate_parts(add)
    _program_parts(add)
    return parser


Add = Callable[[str, Callable[[Arguments], None], str], argparse.ArgumentParser]


def _device_parts(add: Add) -> None:
    part = add("new-client", _new_client, "make the bundle of a new edge device")
    part.add_argument("authority", type=Path, help="the federation's ca.crt")
    part.add_argument("folder", type=Path, help="where the bundle FOLDER/NAME goes")
    part.add_argument("name", help="the device's name")
    part.add_argument("--superlink", required=True, metavar="HOST:PORT", help="the gateway as the device reaches it")
    part.add_argument("--partition", type=int, required=True, help="the device's number, from 0; no two share one")
    part.add_argument("--partitions", type=int, required=True, help="how many devices there are")

    part = add("rotate-key", _rotate_key, "give a device a new key; register it and revoke the old one")
    part.add_argument("bundle", type=Path, help="the folder that new-client made")

    for name, command, text in (
        ("register", _register, "admit devices (at the server)"),
        ("revoke", _revoke, "shut devices out (at the server)"),
    ):
        part = add(name, command, text)
        part.add_argument("keys", nargs="+", metavar="KEY.pub", help="public keys; - for standard input")
        _superlink_options(part)
    _superlink_options(add("nodes", _nodes, "list the admitted devices (at the server)"))


def _superlink_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--superlink", metavar="HOST:PORT", default=os.environ.get(SUPERLINK), help=f"or ${SUPERLINK}")
    part.add_argument("--authority", metavar="ca.crt", default=os.environ.get(AUTHORITY), help=f"or ${AUTHORITY}")


def _certificate_parts(add: Add) -> None:
    part = add("authority", _authority, "make the certificate authority; keep its key offline")
    part.add_argument("folder", type=Path)
    part.add_argument("--days", type=int, default=AUTHORITY_DAYS)

    part = add("server", _server, "make or rotate the server's certificate")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("folder", type=Path)
    part.add_argument("names", nargs="+", metavar="NAME", help="host name or IP address that clients use")
    part.add_argument("--days", type=int, default=MAX_LEAF_DAYS)

    part = add("client", _client, "make or rotate a client certificate, for a gateway that asks for one")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("folder", type=Path)
    part.add_argument("name", help="the device's name")
    part.add_argument("--days", type=int, default=MAX_LEAF_DAYS)

    part = add("revoke-certificate", _revoke_certificate, "put certificates on the authority's list ca.crl")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("files", type=Path, nargs="*", metavar="FILE.crt", help="none: renew the list's dates")

    part = add("node", _node, "make a SuperNode's key pair")
    part.add_argument("folder", type=Path)
    part.add_argument("name", help="the device's name")

    part = add("check", _check, "check signatures, dates and file modes")
    part.add_argument("authority", type=Path, help="the authority's certificate, ca.crt")
    part.add_argument("files", type=Path, nargs="+", metavar="FILE", help="certificates (.crt) and keys (.key)")


def _program_parts(add: Add) -> None:
    part = add("federation", _federation, "make what is missing of all keys and certificates, renew what runs out")
    part.add_argument("folder", type=Path)
    part.add_argument("--device", action="append", default=[], metavar="NAME", help="a device that gets a key here")
    part.add_argument("--names", default="", help="further names of the gateway, separated by commas")

    part = add("sample", _sample, "write sample data: digits, dealt unevenly to the devices")
    part.add_argument("folder", type=Path)
    part.add_argument("devices", nargs="+", metavar="NAME")

    part = add("superlink", _superlink, "become the SuperLink")
    part.add_argument("keys", type=Path, help="folder of ca.crt, server.crt and server.key")
    part.add_argument("--secret", type=Path, required=True, help="folder of the SuperExec's secret")
    part.add_argument("--database", type=Path, required=True)
    part.add_argument("--host", default="127.0.0.1", help="whoever reaches it controls the federation")

    part = add("superexec", _superexec, "become the SuperExec, which starts ServerApps")
    part.add_argument("keys", type=Path, help="folder of ca.crt and the secret")
    part.add_argument("--superlink", required=True, metavar="HOST:PORT")
    part.add_argument("--health", default="127.0.0.1:9100", metavar="HOST:PORT")

    part = add("supernode", _supernode, "become a device's SuperNode")
    part.add_argument("keys", type=Path, help="folder of ca.crt and NAME-node.key")
    part.add_argument("--name", required=True)
    part.add_argument("--superlink", required=True, metavar="HOST:PORT", help="the gateway")
    part.add_argument("--partition", type=int, required=True)
    part.add_argument("--partitions", type=int, required=True)
    part.add_argument("--port", type=int, default=9094, help="for processes of this machine; one per SuperNode")


def _new_client(arguments: Arguments) -> None:
    from deploy.device import Device, new_client, registration

    device = Device(arguments.name, arguments.superlink, arguments.partition, arguments.partitions)
    bundle = new_client(device, arguments.authority, arguments.folder)
    print(f"{bundle}: take this folder to the device; its keys are secret")
    print(f"{bundle}/keys/{device.name}-node.pub: take this file to the server, and there: {registration(device.name)}")


def _rotate_key(arguments: Arguments) -> None:
    from deploy.device import rotate_key

    new, old = rotate_key(arguments.bundle.resolve())
    print(f"{new}: register it\n{old}: revoke it\nThen start the device again.")


def _register(arguments: Arguments) -> None:
    from deploy import nodes

    with _connected(arguments) as client:
        for name, key in _public_keys(arguments.keys):
            node, new = nodes.register(client, key)
            print(f"{name}: node {node}{'' if new else ', registered already'}")


def _revoke(arguments: Arguments) -> None:
    from deploy import nodes

    with _connected(arguments) as client:
        for name, key in _public_keys(arguments.keys):
            print(f"{name}: node {nodes.revoke(client, key)} is shut out")


def _nodes(arguments: Arguments) -> None:
    from deploy import nodes

    with _connected(arguments) as client:
        for node in nodes.listing(client):
            print(f"{node.node_id:>20}  {node.status:<12}  {node.fingerprint}")


def _public_keys(names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    from deploy.nodes import read_public_key

    for name in names:
        try:
            content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as error:
            raise StorageError(f"{name}: this key cannot be read ({error.strerror}).") from error
        yield name, read_public_key(content, name)


@contextlib.contextmanager
def _connected(arguments: Arguments) -> Iterator[ControlHttpClient]:
    """Yield a client of the SuperLink that the options name; its refusals become errors with its words."""
    if not arguments.superlink or not arguments.authority:
        raise ConfigError("Which SuperLink? Give --superlink HOST:PORT and --authority ca.crt.")
    from deploy.nodes import connect

    with connect(arguments.superlink, Path(arguments.authority)) as client:
        yield client


def _authority(arguments: Arguments) -> None:
    _tell(certificates.make_authority(arguments.folder, arguments.days))


def _server(arguments: Arguments) -> None:
    root = _root(arguments.authority)
    _tell(certificates.make_server(root, arguments.folder, arguments.names, arguments.days))


def _client(arguments: Arguments) -> None:
    root = _root(arguments.authority)
    _tell(certificates.make_client(root, arguments.folder, arguments.name, arguments.days))


def _revoke_certificate(arguments: Arguments) -> None:
    from deploy.revocation import revoke

    files: list[Path | None] = list(arguments.files) or [None]
    for file in files:
        print(revoke(_root(arguments.authority), file))


def _node(arguments: Arguments) -> None:
    _tell(certificates.make_node_key(arguments.folder, arguments.name))


def _check(arguments: Arguments) -> None:
    faults = []
    for path in arguments.files:
        try:
            if path.suffix == ".key":
                check_private(path)
                print(f"{path}: private")
            else:
                left = certificates.check_certificate(path, arguments.authority)
                print(f"{path}: {left.days} days left{', rotate it now' if left < start.SOON else ''}")
        except StorageError as error:
            faults.append(str(error))
    if faults:
        raise StorageError("\n".join(faults))


def _federation(arguments: Arguments) -> None:
    from deploy.federation import prepare

    names = [name.strip() for name in arguments.names.split(",") if name.strip()]
    for line in prepare(arguments.folder, arguments.device, names) or ["nothing to do"]:
        print(line)


def _sample(arguments: Arguments) -> None:
    from deploy.sample import write

    os.umask(0o022)
    for path in write(arguments.folder, arguments.devices) or ["nothing to do"]:
        print(path)


def _superlink(arguments: Arguments) -> None:
    start.replace_process(start.superlink(arguments.keys, arguments.secret, arguments.database, arguments.host))


def _superexec(arguments: Arguments) -> None:
    # What runs write is for the person who started them: group and others may read it.
    start.replace_process(start.superexec(arguments.keys, arguments.superlink, arguments.health), umask=0o002)


def _supernode(arguments: Arguments) -> None:
    own = (arguments.partition, arguments.partitions, arguments.port)
    start.replace_process(start.supernode(arguments.keys, arguments.name, arguments.superlink, *own))


def _root(folder: Path) -> KeyPair:
    return KeyPair(folder / "ca.crt", folder / "ca.key")


def _tell(pair: KeyPair) -> None:
    print(f"{pair.public}\n{pair.private} (secret)")


if __name__ == "__main__":
    sys.exit(main())
