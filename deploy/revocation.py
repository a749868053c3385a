"""The authority's certificate revocation list (CRL), for gateways that require client certificates.

SuperNodes have no certificates, they sign with their keys; ``fedcross deploy revoke`` revokes those keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric import ec

from fedcross.core import issued
from fedcross.core import keys as certificates
from fedcross.core.errors import StorageError
from fedcross.core.keys import KeyPair
from fedcross.core.private_files import write_public

CRL_DAYS = 90


def revoke(authority: KeyPair, certificate: Path | None, days: int = CRL_DAYS) -> tuple[Path, int]:
    """Put `certificate` on the list ``ca.crl`` beside the authority's certificate, and sign the list anew.

    With a client's certificate, all unexpired ones of the same device that the authority signed go on the list
    (:mod:`core.issued`), because a rotated one stays valid. Processes that revoke at once wait for each other.

    Parameters
    ----------
    authority : KeyPair
        From :func:`core.keys.make_authority`.
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
        If this authority did not sign the certificate or the list, or the list cannot be written.
    """
    root, key = certificates.read_certificate(authority.public), certificates.read_key(authority.private)
    path = authority.public.with_name("ca.crl")
    with issued.locked(path.parent):
        entries = {entry.serial_number: entry for entry in _read(path, root)} if path.exists() else {}
        before, now = len(entries), datetime.now(UTC)
        for serial in [] if certificate is None else _serials(authority, certificate, root):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            entries.setdefault(serial, entry)
        write_public(path, _list(list(entries.values()), root, key, now, days))
    return path, len(entries) - before


def _serials(authority: KeyPair, certificate: Path, root: x509.Certificate) -> list[int]:
    """Return the serial number of `certificate` and, of a client's, those of all that its device got."""
    leaf = certificates.read_certificate(certificate)
    if not certificates.signed(leaf, root) or leaf.serial_number == root.serial_number:
        raise StorageError(f"{certificate}: not signed by {authority.public}, so it cannot be revoked here.")
    if not certificates.for_clients(leaf):
        return [leaf.serial_number]
    name = issued.of(leaf).name
    others = [one.serial for one in issued.valid(authority.public.parent) if one.name == name]
    return [leaf.serial_number, *others]


def _list(
    entries: Sequence[x509.RevokedCertificate],
    root: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: int,
) -> bytes:
    identifier = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(now - certificates.CLOCK_SKEW)
        .next_update(now + timedelta(days=days))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    )
    for entry in entries:
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256()).public_bytes(codec.Encoding.PEM)


def _read(path: Path, root: x509.Certificate) -> x509.CertificateRevocationList:
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: no readable list of revoked certificates ({error}).") from error
    if not found.is_signature_valid(root.public_key()):  # type: ignore[arg-type]
        raise StorageError(f"{path}: not signed by the authority beside it. Somebody changed it; make it again.")
    return found
