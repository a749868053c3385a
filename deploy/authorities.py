"""Whether the authority in a federation's folder is its own: the one that the copies beside it, and devices, trust."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fedcross.core.errors import StorageError, quoted
from fedcross.core.links import dangling
from fedcross.core.trust import certificates, keys, lasting


def refuse_successor(authority: Path, copies: Sequence[Path], server: Path) -> None:
    """Raise StorageError if the certificate `authority` is away, but one of `copies` or what it signed is there.

    Copies that have all expired are told of and may get a successor: no device trusts them any more. `server` is the
    server's certificate, which an authority must have signed.
    """
    if authority.exists():
        return
    if said := dangling(authority.parent) or dangling(authority):
        raise StorageError(f"{said} Is its disk mounted?")
    found = [copy for copy in copies if copy.exists()]
    if not found and server.exists():
        raise StorageError(
            f"{authority}: missing, though {server} is there, which an authority has signed. Put that one's ca.crt "
            f"there, or move {server} away, for a new authority."
        )
    alive = not_expired(found)
    if found and not alive:
        said = "expired, so nothing trusts it any more. Hand the new ca.crt to all devices"
        print(f"{found[0]}: {said}", file=sys.stderr)
    if not alive:
        return
    key = authority.with_name("ca.key")
    copy = next((one for one in alive if _fits(key, one)), alive[0])
    place = "" if authority.parent.is_dir() else f"mkdir -p -m 700 {quoted(authority.parent)} && "
    without = "" if key.exists() else " (nothing can be signed without its ca.key)"
    raise StorageError(
        f"{authority}: missing, though {copy} is a copy of it. Bring it back, or put that copy there{without}: "
        f"{place}cp {quoted(copy)} {quoted(authority)}\n"
        f"A new one, fedcross deploy authority {quoted(authority.parent)}, locks out all devices."
    )


def refuse_other(authority: Path, copies: Sequence[Path]) -> None:
    """Raise StorageError if no copy is of the authority in the folder, and one is of another that has not expired.

    Where one copy is the authority's own, those that differ are bad ones, and are made again.
    """
    own, others = _root(authority), not_expired([copy for copy in copies if copy.exists()])
    roots = {copy: root for copy in others if (root := _root(copy)) is not None}
    if own is None or not roots or own.public_key() in [root.public_key() for root in roots.values()]:
        return
    key = authority.with_name("ca.key")
    first, *_ = sorted(roots, key=lambda one: not _fits(key, one))
    cure = f"Bring the federation's own {authority.parent} back."
    if not _fits(key, authority):
        cure = f"Put that one there: cp {quoted(first)} {quoted(authority)}"
    said = f"{authority}: of another authority than its copy {first}, which the devices trust. {cure}"
    if not _fits(key, first):
        said += (
            "\nTo change the authority on purpose, remove the copies of the earlier one, call this again and hand the "
            f"new ca.crt to all devices: rm {' '.join(map(quoted, roots))}"
        )
    raise StorageError(said)


def refuse_mixed(authority: Path, folder: Path) -> None:
    """Raise StorageError if `folder`, for whose server `authority` shall sign, has another authority's ca.crt."""
    copy = folder / "ca.crt"
    own, there = _root(authority), _root(copy)
    if own is None or there is None or own.public_key() == there.public_key():
        return
    raise StorageError(
        f"{copy}: of another authority than {authority}, so devices that trust it would refuse the new server.crt. "
        f"Name the right folder of the authority. To change it on purpose: {_change(authority, folder.parent, there)}, "
        "call this again, and hand that ca.crt to all devices."
    )


def refuse_superseded(authority: Path, server: Path) -> None:
    """Raise StorageError if the server's certificate and the ca.crt beside it are of another authority that lasts.

    So ``deploy server`` leaves them after a change of the authority; to sign for the server with the one in the folder
    would undo that, and lock out who has the new ca.crt.

    Parameters
    ----------
    authority, server : Path
        The certificates in a federation's folders ``authority`` and ``server``.
    """
    copy = server.with_name("ca.crt")
    own, other = _root(authority), _root(copy)
    if own is None or other is None or own.public_key() == other.public_key() or not not_expired([copy]):
        return
    try:
        found = certificates.read_certificate(server)
    except StorageError:  # none, or a damaged one
        return
    if not certificates.signed(found, other) or found.not_valid_after_utc <= datetime.now(UTC):
        return
    raise StorageError(
        f"{server}: signed by the authority in {copy}, as after a change of it, and not by {authority}. To sign it "
        f"again would lock out the devices that have {copy}.\nIf that one is the federation's now: "
        f"{_change(copy, server.parent.parent, own)}, then call this again. If {authority} is: rm {quoted(copy)}, then "
        "call this again."
    )


def _change(new: Path, root: Path, earlier: x509.Certificate) -> str:
    """Return the commands that put the authority `new` into all folders below `root` that have the `earlier` one.

    An earlier authority's key stays beside, under another name: it does not fit any more.
    """
    found = sorted(path for path in root.glob("*/ca.crt") if path.resolve() != new.resolve())
    copies = [path for path in found if (there := _root(path)) and there.public_key() == earlier.public_key()]
    key = root / "authority" / "ca.key"
    moves = [f"mv {quoted(key)} {quoted(f'{key}.old')}"] if key.with_name("ca.crt") in copies and key.exists() else []
    each = f'for copy in {" ".join(map(quoted, copies))}; do cp {quoted(new)} "$copy"; done'
    return " && ".join([*moves, each])


def warn_of_end(authority: Path) -> None:
    """Say it if the authority ends within 90 days; raise StorageError if it has expired."""
    left = certificates.validity(authority)
    if left < lasting.AUTHORITY_SOON:
        print(
            f"{authority}: {left.days} days left, and no certificate lives longer. In time, move the files in "
            f"{authority.parent} away, make a new authority (fedcross deploy authority {quoted(authority.parent)}), "
            "call this again, and hand its ca.crt to all devices",
            file=sys.stderr,
        )


def _root(path: Path) -> x509.Certificate | None:
    """Return an authority's certificate; None if there is none that can be read."""
    with contextlib.suppress(StorageError):
        return certificates.read_authority(path)
    return None


def not_expired(copies: Sequence[Path]) -> list[Path]:
    """Return those of an authority's certificates that have not expired, damaged ones among them."""
    roots = {copy: _root(copy) for copy in copies}
    return [copy for copy, root in roots.items() if root is None or root.not_valid_after_utc > datetime.now(UTC)]


def _fits(key: Path, certificate: Path) -> bool:
    """Return whether `key` is there and is that of the authority's certificate."""
    root = _root(certificate)
    with contextlib.suppress(StorageError):
        return root is not None and key.exists() and keys.load(key).public_key() == root.public_key()
    return False
