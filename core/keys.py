"""Certificates and node keys of a federation.

An offline certificate authority (CA, EC P-256, may sign no further authority) signs the server's certificate and,
where a gateway asks for them, the devices' client certificates. Leaf certificates live for at most 90 days; signing
again with the same CA rotates them without touching the devices. Besides, every SuperNode has a key pair of its own
(EC P-384, OpenSSH format, as ``ssh-keygen -t ecdsa -b 384`` makes it) that the SuperLink knows by registration.

This module does not use Flower; both the ``superlink`` engine and the compose federation call these functions.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.private_files import check_private, private_folder, write_private, write_public

MAX_LEAF_DAYS = 90
AUTHORITY_DAYS = 730
LOOPBACK = ("localhost", "127.0.0.1")

# Edge devices without a battery-backed clock are often some minutes late.
CLOCK_SKEW = timedelta(minutes=10)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class KeyPair:
    """Paths of a private key and of its public part (a certificate or an OpenSSH public key)."""

    public: Path
    private: Path


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> KeyPair:
    """Make ``ca.crt`` and ``ca.key`` in `folder`; keep the key on a machine that runs no server.

    Raises
    ------
    StorageError
        If there already is an authority: replacing it would lock out every device that trusts it.
    """
    pair = KeyPair(folder / "ca.crt", folder / "ca.key")
    private_folder(folder)
    for path in (pair.public, pair.private):
        if path.exists():
            raise StorageError(f"{path}: an authority exists here already. Use it, or choose another folder.")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject("fedcross certificate authority")
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _save(pair, certificate, key)
    return pair


def make_server(
    authority: KeyPair, folder: Path, names: Sequence[str], days: int = MAX_LEAF_DAYS, now: datetime | None = None
) -> KeyPair:
    """Make, or rotate, ``server.crt`` and ``server.key``.

    Parameters
    ----------
    authority : KeyPair
        From :func:`make_authority`.
    folder : Path
        Where the pair goes; an older pair is replaced.
    names : sequence of str
        Host names and IP addresses that clients use to reach the server; ``localhost`` and ``127.0.0.1`` are added.
    days : int
        Lifetime, 1 to 90 and not beyond that of the authority.
    now : datetime, optional
        When it begins; default: now.
    """
    unique = list(dict.fromkeys([*names, *LOOPBACK]))
    alternatives = [_alternative(name) for name in unique]
    return _leaf(authority, folder, "server", unique[0], alternatives, ExtendedKeyUsageOID.SERVER_AUTH, days, now)


def make_client(authority: KeyPair, folder: Path, name: str, days: int = MAX_LEAF_DAYS) -> KeyPair:
    """Make, or rotate, the client certificate ``NAME.crt`` with its key ``NAME.key`` (mutual TLS at the gateway)."""
    check_name(name)
    return _leaf(authority, folder, name, name, [x509.DNSName(name)], ExtendedKeyUsageOID.CLIENT_AUTH, days)


def make_node_key(folder: Path, name: str) -> KeyPair:
    """Make the key pair with which a SuperNode authenticates itself: ``NAME-node.key`` and ``NAME-node.pub``.

    Raises
    ------
    StorageError
        If the key exists already: with a new key the SuperLink would treat the node as another one.
    """
    check_name(name)
    private_folder(folder)
    pair = KeyPair(folder / f"{name}-node.pub", folder / f"{name}-node.key")
    if pair.private.exists():
        raise StorageError(f"{pair.private}: this node has a key already. Remove it first if it shall be replaced.")
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(
        pair.private, key.private_bytes(codec.Encoding.PEM, codec.PrivateFormat.OpenSSH, codec.NoEncryption())
    )
    line = key.public_key().public_bytes(codec.Encoding.OpenSSH, codec.PublicFormat.OpenSSH)
    write_public(pair.public, line + b" " + name.encode() + b"\n")
    return pair


def check_certificate(certificate: Path, authority: Path, now: datetime | None = None) -> timedelta:
    """Return how long `certificate` stays valid.

    Raises
    ------
    StorageError
        If it cannot be read, is not signed by `authority`, has expired or is not yet valid.
    """
    leaf, root = read_certificate(certificate), read_certificate(authority)
    try:
        leaf.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise StorageError(f"{certificate}: not signed by {authority}. Sign it again with fedcross deploy.") from error
    return validity(certificate, now)


def validity(certificate: Path, now: datetime | None = None) -> timedelta:
    """Return how long `certificate` stays valid, whoever signed it; raise StorageError outside its dates."""
    leaf = read_certificate(certificate)
    now = now or datetime.now(UTC)
    if now < leaf.not_valid_before_utc:
        raise StorageError(f"{certificate}: valid from {leaf.not_valid_before_utc:%F %T} UTC; is this clock right?")
    left = leaf.not_valid_after_utc - now
    if left <= timedelta(0):
        raise StorageError(f"{certificate}: expired on {leaf.not_valid_after_utc:%F}. Rotate it with fedcross deploy.")
    return left


def read_certificate(path: Path) -> x509.Certificate:
    """Read a PEM certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: this certificate cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise StorageError(f"{path}: this is no PEM certificate ({error}).") from error


def server_names(path: Path) -> set[str]:
    """Return the host names and addresses in a certificate."""
    names = read_certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = names.get_values_for_type(x509.IPAddress)
    return {*names.get_values_for_type(x509.DNSName), *(str(address) for address in addresses)}


def check_name(name: str) -> str:
    """Return `name` if it can name a device: letters, digits and inner hyphens, 63 at most (it becomes a file name)."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: use letters, digits and inner hyphens, at most 63 characters.")
    return name


def _leaf(
    authority: KeyPair,
    folder: Path,
    stem: str,
    common_name: str,
    alternatives: Sequence[x509.GeneralName],
    usage: x509.ObjectIdentifier,
    days: int,
    now: datetime | None = None,
) -> KeyPair:
    if not 1 <= days <= MAX_LEAF_DAYS:
        raise ConfigError(f"days={days}: a certificate lives 1 to {MAX_LEAF_DAYS} days.")
    private_folder(folder)
    root, root_key = read_certificate(authority.public), read_key(authority.private)
    if root.public_key() != root_key.public_key():
        raise StorageError(f"{authority.private}: this is not the key of {authority.public}.")
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(_subject(common_name), root.subject, key.public_key(), days, root.not_valid_after_utc, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    pair = KeyPair(folder / f"{stem}.crt", folder / f"{stem}.key")
    _save(pair, certificate, key)
    return pair


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    latest: datetime | None = None,
    now: datetime | None = None,
) -> x509.CertificateBuilder:
    now = now or datetime.now(UTC)
    end = now + timedelta(days=days)
    if latest is not None:
        if latest <= now:
            raise StorageError(
                f"the authority expired on {latest:%F}. Make a new one and hand its ca.crt to all devices."
            )
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


def _save(pair: KeyPair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    write_private(pair.private, key.private_bytes(codec.Encoding.PEM, codec.PrivateFormat.PKCS8, codec.NoEncryption()))
    write_public(pair.public, certificate.public_bytes(codec.Encoding.PEM))


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read an authority's private key, if only its owner can."""
    try:
        key = codec.load_pem_private_key(check_private(path).read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path}: this is no unencrypted PEM private key ({error}).") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StorageError(f"{path}: an elliptic-curve key is needed, this is {type(key).__name__}.")
    return key


def _subject(common_name: str) -> x509.Name:
    # X.509 allows 64 characters here; the full name is in the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        labels = name.split(".")
        if len(name) > 253 or not all(_NAME.fullmatch(label) for label in labels) or labels[-1].isdigit():
            raise ConfigError(f"server name {name!r}: neither an IP address nor a host name.") from None
        return x509.DNSName(name)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
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
