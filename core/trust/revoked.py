"""The authority's list of revoked client certificates, ``ca.crl`` beside its own certificate, as it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path

from cryptography import x509

from fedcross.core.errors import StorageError, quoted
from fedcross.core.links import dangling, followed
from fedcross.core.trust import issued

#: The list's file.
LIST = "ca.crl"


def read(path: Path, root: x509.Certificate) -> x509.CertificateRevocationList:
    """Return the list in `path`; raise StorageError if there is none, or the authority `root` did not sign it."""
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
    except PermissionError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}). Run as its owner.") from error
    except OSError as error:
        _refuse_lost_link(path)
        raise StorageError(f"{path}: no readable list of revoked certificates ({error}). {_cure(path)}") from error
    except ValueError as error:
        raise StorageError(f"{path}: no readable list of revoked certificates ({error}). {_cure(path)}") from error
    if not found.is_signature_valid(root.public_key()):  # type: ignore[arg-type]
        raise StorageError(f"{path}: not signed by the authority beside it. Somebody changed it. {_cure(path)}")
    return found


def number(found: x509.CertificateRevocationList) -> int:
    """Return the number of a list, which grows with each one that the authority signs; 0 if it has none."""
    with contextlib.suppress(x509.ExtensionNotFound):
        return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    return 0


def refuse_earlier(path: Path, others: Iterable[Path]) -> None:
    """Raise StorageError if the list in `path` is earlier, or shorter, than one of `others` of the same authority.

    So a copy of the authority's folder with an older list and an older record shows beside the gateway's list.
    """
    found = x509.load_pem_x509_crl(path.read_bytes())
    here, merges = {one.serial_number for one in found}, path.with_name(issued.FILE).exists()
    for other in others:
        with contextlib.suppress(OSError, ValueError):  # one that is no list is told of by itself
            listed = x509.load_pem_x509_crl(other.read_bytes())
            there = {one.serial_number for one in listed}
            lacks = len(there - here)
            forgets = bool(here - there)  # the other list, alone in its place
            earlier = (lacks > 0 and merges) if forgets else (lacks > 0 or number(listed) > number(found))
            if _signer(listed) == _signer(found) and earlier:
                again = f" && fedcross deploy revoke-certificate {quoted(path.parent)}" if merges else ""
                raise StorageError(
                    f"{path}: an earlier list than {other}, {lacks} that are revoked there are not here. Copy that one "
                    f"there: cp {quoted(other)} {quoted(path)}{again}"
                )


def _signer(found: x509.CertificateRevocationList) -> bytes | None:
    """Return the identifier of the key that signed a list; None if it names none."""
    with contextlib.suppress(x509.ExtensionNotFound):
        return found.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    return None


def is_there(path: Path) -> bool:
    """Return whether there is a list, or a link in its place that leads nowhere."""
    return path.exists() or path.is_symlink()


def dates(path: Path, root: x509.Certificate) -> dict[int, datetime]:
    """Return the serial numbers on the list and when each was revoked; none if there is no list."""
    if not is_there(path):
        return {}
    return {entry.serial_number: entry.revocation_date_utc for entry in read(path, root)}


def known(folder: Path, root: x509.Certificate) -> dict[int, datetime]:
    """Return what :func:`dates` returns of the list in an authority's folder, for the record beside it.

    A list that cannot be read is passed over if there is a record, which has what was on the list.

    Raises
    ------
    StorageError
        If the list cannot be read and there is no record: what is revoked would be forgotten.
    """
    try:
        return dates(folder / LIST, root)
    except StorageError:
        if not (folder / issued.FILE).exists():
            raise
        return {}


def refuse_older(path: Path, found: Collection[int]) -> None:
    """Raise StorageError if the list in `path`, with the serial numbers `found`, lacks some that the record has."""
    recorded = _recorded(path.parent)
    if lacks := recorded - {*found}:
        raise StorageError(
            f"{path}: lacks {len(lacks)} of the {len(recorded)} that {issued.FILE} records as revoked, as an older "
            f"copy does. Sign it again: fedcross deploy revoke-certificate {quoted(path.parent)}"
        )


def refuse_loss(path: Path) -> None:
    """Raise StorageError if there is no list, but the authority's records say that one was made."""
    if recorded := len(_recorded(path.parent)):
        raise StorageError(
            f"{path}: missing, though {issued.FILE} records {recorded} revoked. Make it again: fedcross deploy "
            f"revoke-certificate {quoted(path.parent)}"
        )


def _recorded(folder: Path) -> set[int]:
    """Return the serial numbers that the record in `folder` has as revoked; none if this user cannot read it."""
    with contextlib.suppress(StorageError):
        return {one.serial for one in issued.kept(folder) if one.revoked is not None}
    return set()


def _refuse_lost_link(path: Path) -> None:
    """Raise StorageError if the list is a link to where none is: the gateway reads it there, so the link must stay."""
    if not path.is_symlink():
        return
    target = quoted(followed(path))
    if not (said := dangling(path)):
        return
    raise StorageError(
        f"{said} Is its disk mounted? If the list is lost, put its newest copy there; if there is none, make "
        f"one of what {issued.FILE} records, and link it: rm {quoted(path)} && fedcross deploy revoke-certificate "
        f"{quoted(path.parent)} && mv {quoted(path)} {target} && ln -s {target} {quoted(path)}"
    )


def _cure(path: Path) -> str:
    """Return what to do about a list that is none: an older copy would let in again what was revoked since.

    What a link leads to is to be removed, and not the link.
    """
    again = f"fedcross deploy revoke-certificate {quoted(path.parent)}"
    if path.is_symlink():
        return f"It is a link: put the list's newest copy at {followed(path)}, then {again} signs it anew."
    if recorded := len(_recorded(path.parent)):
        return (
            f"Remove it, then {again} makes it again from what {issued.FILE} records as revoked ({recorded}; name any "
            "other one again)."
        )
    return (
        f"{issued.FILE} records none as revoked. Bring the newest copy back and name what was revoked since, or remove "
        f"it and name each one: {again} FILE.crt"
    )
