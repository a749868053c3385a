"""What the certificates of a federation have in common: who, by whom, from when to when, and for what."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# Edge devices without a battery-backed clock are often some minutes late.
CLOCK_SKEW = timedelta(minutes=10)


def builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    latest: datetime | None = None,
    now: datetime | None = None,
) -> x509.CertificateBuilder:
    """Return a certificate for `key` without extensions and signature: `days` days from `now` on, until `latest`."""
    now = now or datetime.now(UTC)
    end = now + timedelta(days=days)
    if latest is not None:
        end = min(end, latest)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
    )


def subject(common_name: str) -> x509.Name:
    """Return the name of who gets or signs a certificate."""
    # X.509 allows 64 characters here; the full name is in the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def key_usage(*, authority: bool) -> x509.KeyUsage:
    """Return what a key may do: sign certificates and lists, the authority's; else sign alone."""
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
