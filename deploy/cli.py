"""The ``fedcross-deploy`` command: certificates and keys of a federation.

::

    fedcross-deploy authority keys/ca
    fedcross-deploy server    keys/ca keys/server superlink.example.org 192.0.2.7
    fedcross-deploy client    keys/ca keys/devices device-1
    fedcross-deploy node      keys/devices device-1
    fedcross-deploy check     keys/ca/ca.crt keys/server/server.crt keys/server/server.key
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from deploy import certificates
from deploy.certificates import AUTHORITY_DAYS, MAX_LEAF_DAYS, KeyPair
from deploy.files import check_private
from tasks.errors import FedcrossError, StorageError

# With a week left there is time to rotate in working hours.
_WARN = timedelta(days=7)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 2 for wrong use or unusable files."""
    os.umask(0o077)
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except FedcrossError as error:
        print(f"fedcross-deploy: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedcross-deploy", description="Certificates and keys of a federation (see docs/deploy.md)."
    )
    parts = parser.add_subparsers(required=True, metavar="COMMAND")

    part = parts.add_parser("authority", help="make the certificate authority; keep its key offline")
    part.add_argument("folder", type=Path)
    part.add_argument("--days", type=int, default=AUTHORITY_DAYS)
    part.set_defaults(command=_authority)

    part = parts.add_parser("server", help="make or rotate the server's certificate")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("folder", type=Path)
    part.add_argument("names", nargs="+", metavar="NAME", help="host name or IP address that clients use")
    part.add_argument("--days", type=int, default=MAX_LEAF_DAYS)
    part.set_defaults(command=_server)

    part = parts.add_parser("client", help="make or rotate a device's client certificate")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("folder", type=Path)
    part.add_argument("name", help="the device's name")
    part.add_argument("--days", type=int, default=MAX_LEAF_DAYS)
    part.set_defaults(command=_client)

    part = parts.add_parser("node", help="make a SuperNode's key pair")
    part.add_argument("folder", type=Path)
    part.add_argument("name", help="the device's name")
    part.set_defaults(command=_node)

    part = parts.add_parser("check", help="check signatures, dates and file modes")
    part.add_argument("authority", type=Path, help="the authority's certificate, ca.crt")
    part.add_argument("files", type=Path, nargs="+", metavar="FILE", help="certificates (.crt) and keys (.key)")
    part.set_defaults(command=_check)
    return parser


def _authority(arguments: argparse.Namespace) -> None:
    _tell(certificates.make_authority(arguments.folder, arguments.days))


def _server(arguments: argparse.Namespace) -> None:
    root = _root(arguments.authority)
    _tell(certificates.make_server(root, arguments.folder, arguments.names, arguments.days))


def _client(arguments: argparse.Namespace) -> None:
    root = _root(arguments.authority)
    _tell(certificates.make_client(root, arguments.folder, arguments.name, arguments.days))


def _node(arguments: argparse.Namespace) -> None:
    _tell(certificates.make_node_key(arguments.folder, arguments.name))


def _check(arguments: argparse.Namespace) -> None:
    faults = []
    for path in arguments.files:
        try:
            if path.suffix == ".key":
                check_private(path)
                print(f"{path}: private")
            else:
                left = certificates.check_certificate(path, arguments.authority)
                print(f"{path}: {left.days} days left{', rotate it now' if left < _WARN else ''}")
        except StorageError as error:
            faults.append(str(error))
    if faults:
        raise StorageError("\n".join(faults))


def _root(folder: Path) -> KeyPair:
    return KeyPair(folder / "ca.crt", folder / "ca.key")


def _tell(pair: KeyPair) -> None:
    print(f"{pair.public}\n{pair.private} (secret)")


if __name__ == "__main__":
    sys.exit(main())
