"""Certificates and keys on the curve P-256: a certificate authority, a server certificate, a key for each SuperNode."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcross.core.errors import StorageError
from fedcross.core.files import private_folder, write_private, write_public

#: Days for which a certificate is valid.
AUTHORITY_DAYS, SERVER_DAYS = 3650, 365
#: A certificate is valid from this long before it was made: clocks of devices differ.
_MARGIN = timedelta(hours=1)


class KeyPair(NamedTuple):
    """Paths of a certificate or public key, and of its private key."""

    public: Path
    private: Path


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> KeyPair:
    """Make ``ca.crt`` and ``ca.key`` in `folder`; the key signs server certificates and nothing else."""
    pair, key = KeyPair(private_folder(folder) / "ca.crt", folder / "ca.key"), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = (
        _certificate("fedcross authority", None, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _write(pair, key, builder.sign(key, hashes.SHA256()))


def make_server(authority: KeyPair, folder: Path, names: Sequence[str], days: int = SERVER_DAYS) -> KeyPair:
    """Make ``server.crt`` and ``server.key`` in `folder`, signed by `authority`.

    `names` are the host names and IP addresses under which devices reach the server. The certificate ends with the
    authority's at the latest; StorageError if that has expired or cannot be read.
    """
    pair = KeyPair(private_folder(folder) / "server.crt", folder / "server.key")
    issuer, signer = read_certificate(authority.public), read_key(authority.private)
    left = (issuer.not_valid_after_utc - datetime.now(UTC)).days
    if left < 1:
        raise StorageError(f"{authority.public}: has expired. Make a new federation: fedcross deploy init.")
    key, alternatives = ec.generate_private_key(ec.SECP256R1()), []
    for name in names:
        alternatives.append(x509.DNSName(name))
        with suppress(ValueError):
            alternatives[-1] = x509.IPAddress(ipaddress.ip_address(name))  # type: ignore[call-overload]
    builder = (
        _certificate(names[0][:64], issuer.subject, key, min(days, left))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return _write(pair, key, builder.sign(signer, hashes.SHA256()))


def make_node_key(folder: Path, name: str, comment: str = "") -> KeyPair:
    """Make ``NAME-node.key`` and the public key ``NAME-node.pub`` of a SuperNode in `folder`, both as OpenSSH's."""
    pair = KeyPair(private_folder(folder) / f"{name}-node.pub", folder / f"{name}-node.key")
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(pair.private, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write_public(pair.public, public + f" {comment or name}\n".encode())
    return pair


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in `path`; StorageError if there is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: no readable certificate ({error}). Run: fedcross deploy init.") from error


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in `path`; StorageError if there is none on a curve."""
    try:
        content = path.read_bytes()
        ssh = content.startswith(b"-----BEGIN OPENSSH")
        key = (form.load_ssh_private_key if ssh else form.load_pem_private_key)(content, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("not on an elliptic curve")
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{path}: no readable private key ({error}). Restore it from a backup.") from error
    return key


def _certificate(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer_name=issuer or subject, subject_name=subject, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _MARGIN)
        .not_valid_after(now + timedelta(days=days))
    )


def _write(pair: KeyPair, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> KeyPair:
    write_private(pair.private, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    write_public(pair.public, certificate.public_bytes(form.Encoding.PEM))
    return pair
