"""The authority's certificate revocation list (CRL), for gateways that require client certificates.

SuperNodes have no certificates, they sign with their keys; ``fedcross deploy revoke`` revokes those keys.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as codec

from fedcross.core import keys as certificates
from fedcross.core.errors import StorageError
from fedcross.core.keys import KeyPair
from fedcross.core.private_files import write_public

CRL_DAYS = 90


def revoke(authority: KeyPair, certificate: Path | None, days: int = CRL_DAYS) -> Path:
    """Put `certificate` on the list ``ca.crl`` beside the authority's certificate, and sign the list anew.

    Parameters
    ----------
    authority : KeyPair
        From :func:`core.keys.make_authority`.
    certificate : Path or None
        The certificate to revoke; None to renew only the dates of the list.
    days : int
        How long the list is valid. With an expired list, the gateway refuses every client.

    Raises
    ------
    StorageError
        If this authority did not sign the certificate or the list.
    """
    root, key = certificates.read_certificate(authority.public), certificates.read_key(authority.private)
    path = authority.public.with_name("ca.crl")
    now = datetime.now(UTC)
    entries: dict[int, x509.RevokedCertificate] = {}
    if path.exists():
        for entry in _read(path, root):
            entries[entry.serial_number] = entry
    if certificate is not None:
        leaf = certificates.read_certificate(certificate)
        if not _signed(leaf, root) or leaf.serial_number == root.serial_number:
            raise StorageError(f"{certificate}: not signed by {authority.public}, so it cannot be revoked here.")
        entry = x509.RevokedCertificateBuilder().serial_number(leaf.serial_number).revocation_date(now).build()
        entries.setdefault(leaf.serial_number, entry)
    identifier = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(now - certificates.CLOCK_SKEW)
        .next_update(now + timedelta(days=days))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    )
    for entry in entries.values():
        builder = builder.add_revoked_certificate(entry)
    write_public(path, builder.sign(key, hashes.SHA256()).public_bytes(codec.Encoding.PEM))
    return path


def _read(path: Path, root: x509.Certificate) -> x509.CertificateRevocationList:
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: no readable list of revoked certificates ({error}).") from error
    if not found.is_signature_valid(root.public_key()):  # type: ignore[arg-type]
        raise StorageError(f"{path}: not signed by the authority beside it. Somebody changed it; make it again.")
    return found


def _signed(leaf: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
