"""The authority's certificate revocation list (CRL), for gateways that require client certificates.

SuperNodes have no certificates, they sign with their keys; ``fedcross deploy revoke`` revokes those keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric import ec

from fedcross.core.errors import StorageError, quoted
from fedcross.core.private_files import write_public
from fedcross.core.replacing import tidy
from fedcross.core.trust import certificates, fields, issued, signing
from fedcross.core.trust.issued import Issued
from fedcross.core.trust.keys import KeyPair
from fedcross.core.trust.revoked import LIST, dates, is_there, number, read, refuse_loss, refuse_older

CRL_DAYS = 90


def revoke(authority: KeyPair, certificate: Path | None, days: int = CRL_DAYS) -> tuple[Path, int]:
    """Put `certificate` on the list ``ca.crl`` beside the authority's certificate, and sign the list anew.

    With a client's certificate, all of the same device that the authority's record keeps go on the list, expired ones
    too (:mod:`core.trust.issued`), because a rotated one stays valid, and a fast clock tells wrong; not with one that
    is on the list already, as its device may have got another one since. What is revoked is recorded there too, so a
    lost list is made again. Processes that revoke at once wait for each other.

    Parameters
    ----------
    authority : KeyPair
        From :func:`core.signing.make_authority`.
    certificate : Path or None
        The certificate to revoke; None to renew only the dates of the list.
    days : int
        How long the list is valid. With an expired list, the gateway refuses every client.

    Returns
    -------
    tuple
        The list's path, and how many certificates were revoked that were not on the list before.

    Raises
    ------
    StorageError
        If this authority did not sign the certificate or the list, the certificate is a server's, the list cannot be
        written, or the authority has expired or not begun by this clock.
    """
    root, key = certificates.read_authority(authority.public), signing.signing_key(authority)
    now = datetime.now(UTC)
    certificates.check_begun(authority.public, now)
    certificates.refuse_expired(authority.public, root, now)
    path = authority.public.with_name(LIST)
    tidy(path.parent)
    with issued.locked(path.parent):
        known = {one.serial: one for one in issued.kept(path.parent)}
        revoked = {serial: one.revoked for serial, one in known.items() if one.revoked is not None}
        revoked |= dates(path, root)
        before = len(revoked)
        if certificate is not None:
            leaf = issued.of(_revocable(certificate, root, authority.public))
            known.setdefault(leaf.serial, leaf)
            for serial in [] if leaf.serial in revoked else _of_device(leaf, known):
                revoked.setdefault(serial, now)
        issued.write(path.parent, issued.with_revoked(known, revoked, root.not_valid_after_utc))
        later = number(read(path, root)) + 1 if is_there(path) else 0  # one that a fast clock has signed is earlier too
        write_public(path, _list(revoked, root, key, now, now + timedelta(days=days), max(int(now.timestamp()), later)))
    return path, len(revoked) - before


def is_recorded(certificate: Path, folder: Path) -> bool:
    """Return whether the authority's record in `folder` has `certificate`.

    If not, an earlier version signed it or the record was lost, so what else its device got may not be in it either.
    """
    serial = certificates.read_certificate(certificate).serial_number
    return any(one.serial == serial for one in issued.kept(folder))


def _revocable(certificate: Path, root: x509.Certificate, authority: Path) -> x509.Certificate:
    """Return the certificate in a file if `root`, which is in the file `authority`, can revoke it."""
    leaf = certificates.one_certificate(certificate)
    if not certificates.signed(leaf, root) or leaf.serial_number == root.serial_number:
        raise StorageError(f"{certificate}: not signed by {authority}, so it cannot be revoked here.")
    if certificates.for_servers(leaf):
        raise StorageError(
            f"{certificate}: the certificate of a server, and devices read no list of revoked ones. If its key was "
            f"stolen, make a new authority and hand its ca.crt to all devices; else it ends on "
            f"{leaf.not_valid_after_utc:%F}."
        )
    return leaf


def _of_device(leaf: Issued, known: Mapping[int, Issued]) -> list[int]:
    """Return the serial numbers of a certificate and of all that its device got."""
    return [leaf.serial, *(one.serial for one in known.values() if leaf.name and one.name == leaf.name)]


def check_revoked(certificate: Path, authority: Path) -> None:
    """Raise StorageError if the list beside the authority's certificate has `certificate`, is lost or an older one."""
    path = authority.with_name(LIST)
    if not is_there(path):
        refuse_loss(path)
        return
    serial = certificates.read_certificate(certificate).serial_number
    found = dates(path, certificates.read_certificate(authority))
    if serial in found:
        raise StorageError(
            f"{certificate}: revoked on {found[serial]:%F} ({path}). Make a new one with fedcross deploy client."
        )
    refuse_older(path, found)


def check_list(path: Path, authority: Path) -> timedelta:
    """Return how long a list stays valid.

    Raises
    ------
    StorageError
        If it is expired, older than the record beside it, not signed by `authority`, or begins in the future.
    """
    root = certificates.read_certificate(authority)
    found = read(path, root)
    refuse_older(path, [entry.serial_number for entry in found])
    again = f"Sign it again: fedcross deploy revoke-certificate {quoted(path.parent)}"
    end, now = found.next_update_utc or root.not_valid_after_utc, datetime.now(UTC)
    left = end - now
    if now < found.last_update_utc:
        raise StorageError(
            f"{path}: valid from {found.last_update_utc:%F %T} UTC, so a gateway that reads it refuses every client "
            f"until then; is this clock right? If it is, the list was signed with a fast clock. {again}"
        )
    if left <= timedelta(0):
        raise StorageError(f"{path}: ended on {end:%F}, so a gateway that reads it refuses every client. {again}")
    return left


def _list(
    revoked: Mapping[int, datetime],
    root: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
    number: int,
) -> bytes:
    identifier = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(begin - fields.CLOCK_SKEW)
        .next_update(end)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, when in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256()).public_bytes(codec.Encoding.PEM)
