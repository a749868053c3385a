"""The actions of ``fedcross deploy`` about keys and certificates of the federation and its authority."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import StorageError
from fedcross.core.exposed import check_owner
from fedcross.core.links import resolved
from fedcross.core.private_files import alone, check_place
from fedcross.core.trust import certificates, issued, lasting, revoked, signing
from fedcross.core.trust.keys import KeyPair, make_node_key
from fedcross.deploy import authorities, restarts, start

if TYPE_CHECKING:
    pass


def authority(arguments: argparse.Namespace) -> None:
    """Make the authority."""
    _check_way(arguments.folder)
    found = sorted(arguments.folder.parent.glob("*/ca.crt"))
    copies = [path for path in found if path.parent != arguments.folder and not path.with_name("ca.key").exists()]
    _tell(signing.make_authority(arguments.folder, arguments.days))
    if copies:
        print(
            f"{copies[0]} is of another authority: devices that trust that one are locked out until they get the new "
            "ca.crt",
            file=sys.stderr,
        )


def server(arguments: argparse.Namespace) -> None:
    """Make the server's certificate, with the names by which the federation's own parts reach it too, and its token.

    Beside them lies a copy of the authority's certificate then, as ``superlink`` and ``gateway`` need it.
    """
    from fedcross.deploy.federation import INNER_NAMES, authority_copy, gateway_token

    root, before = _root(arguments.authority), (arguments.folder / "server.key").exists()
    _check_way(arguments.folder)
    authorities.refuse_mixed(root.public, arguments.folder)
    names = [*arguments.names, *INNER_NAMES]
    with alone(arguments.authority):  # federation, which renews this pair too, waits
        _tell(signing.make_server(root, arguments.folder, names, arguments.days))
        tokens = gateway_token(arguments.folder)
        for made in tokens:
            print(f"{made} (secret)")
        for made in authority_copy(root.public, arguments.folder):  # the programs that get this folder need it
            print(made)
    if before:
        files = [str(arguments.folder / "server.key"), *tokens]
        print(restarts.line([restarts.SUPERLINK, restarts.GATEWAY], files), file=sys.stderr)


def client(arguments: argparse.Namespace) -> None:
    """Make a client certificate."""
    root = _root(arguments.authority)
    _check_way(arguments.folder)
    _tell(signing.make_client(root, arguments.folder, arguments.name, arguments.days))


def revoke_certificate(arguments: argparse.Namespace) -> None:
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
        said = f"(all of its device in {issued.FILE})"
        if not new:
            said = "(it was before; what its device got since is valid)"
        elif not recorded:
            said = (
                f"({issued.FILE} did not have it, so it may lack others of its device too: revoke each of them by its "
                "own file)"
            )
        print(path if file is None else f"{path}: newly revoked with {file}: {new} {said}")
    _raise(faults)


def node(arguments: argparse.Namespace) -> None:
    """Make a SuperNode's key pair."""
    _check_way(arguments.folder)
    _tell(make_node_key(arguments.folder, arguments.name))


def check(arguments: argparse.Namespace) -> None:
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


def federation(arguments: argparse.Namespace) -> None:
    """Make all missing keys and certificates."""
    from fedcross.deploy.federation import prepare

    names = [name.strip() for name in arguments.names.split(",") if name.strip()]
    made = prepare(arguments.folder, arguments.device, names)
    print("\n".join(made or ["nothing to do"]))
    for line in restarts.after(arguments.folder, made):
        print(line, file=sys.stderr)


def _check_way(folder: Path) -> None:
    """Raise StorageError if another user's link leads to `folder`, for keys, or others can put theirs in its place."""
    resolved(folder)
    check_place(folder.parent)


def _root(folder: Path) -> KeyPair:
    return KeyPair(folder / "ca.crt", folder / "ca.key")


def _tell(pair: KeyPair) -> None:
    print(f"{pair.public}\n{pair.private} (secret)")
