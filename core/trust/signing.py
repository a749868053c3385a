"""Makes an authority and signs the certificates of a federation.

An offline certificate authority (CA, EC P-256, may sign no further authority) signs the server's certificate and,
where a gateway asks for them, the devices' client certificates. Leaf certificates live for at most 90 days; signing
again with the same CA rotates them without touching the devices. SuperNodes have no certificates: their keys are in
:mod:`core.trust.keys`.

This module does not use Flower; both the ``superlink`` engine and the compose federation call these functions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.links import refuse_link
from fedcross.core.private_files import alone, private_folder
from fedcross.core.replacing import tidy

from . import certificates, fields, issued, keys, revoked
from .keys import KeyPair

MAX_LEAF_DAYS = 90
AUTHORITY_DAYS = 730
MAX_AUTHORITY_DAYS = 36500
LOOPBACK = ("localhost", "127.0.0.1")
#: Files of the authority and of the server have these names; no device can.
TAKEN = ("ca", "server", "superexec")


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> KeyPair:
    """Make ``ca.crt`` and ``ca.key`` in `folder`; keep the key on a machine that runs no server.

    Of several processes one makes them, and the others find them there.

    Raises
    ------
    ConfigError
        If `days` is not 1 to 36500.
    StorageError
        If there already is an authority: replacing it would lock out every device that trusts it.
    """
    if not 1 <= days <= MAX_AUTHORITY_DAYS:
        raise ConfigError(f"days={days}: an authority lives 1 to {MAX_AUTHORITY_DAYS} days.")
    with alone(private_folder(folder)):
        tidy(folder)
        return new_authority(folder, days)


def new_authority(folder: Path, days: int = AUTHORITY_DAYS) -> KeyPair:
    """Make what :func:`make_authority` makes, in a folder that is there; call it inside ``alone(folder)``.

    Raises
    ------
    StorageError
        If there already is an authority, or a part of one.
    """
    pair = KeyPair(folder / "ca.crt", folder / "ca.key")
    if pair.public.exists():
        certificates.refuse_expired(pair.public, certificates.one_certificate(pair.public))
        raise StorageError(f"{pair.public}: an authority exists here already. Use it, or choose another folder.")
    if pair.private.exists():
        raise StorageError(
            f"{pair.private}: an authority's key without its {pair.public.name}. Bring that back, or remove the key if "
            "no device has the certificate, or it has expired."
        )
    for path in pair.public, pair.private:  # to a memory stick that is away, perhaps, with the authority on it
        refuse_link(path)
    key = ec.generate_private_key(ec.SECP256R1())
    name = fields.subject("fedcross certificate authority")
    certificate = (
        fields.builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(fields.key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    keys.save(pair, certificate.public_bytes(codec.Encoding.PEM), key)
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
        Host names and IP addresses that clients use to reach the server, in any spelling; ``localhost`` and
        ``127.0.0.1`` are added.
    days : int
        Lifetime, 1 to 90 and not beyond that of the authority.
    now : datetime, optional
        When it begins; default: now.
    """
    unique = list(dict.fromkeys(map(check_host, [*names, *LOOPBACK])))
    alternatives = [_alternative(name) for name in unique]
    return _leaf(authority, folder, "server", unique[0], alternatives, ExtendedKeyUsageOID.SERVER_AUTH, days, now)


def make_client(authority: KeyPair, folder: Path, name: str, days: int = MAX_LEAF_DAYS) -> KeyPair:
    """Make, or rotate, the client certificate ``NAME.crt`` with its key ``NAME.key`` (mutual TLS at the gateway).

    The authority lists it (:mod:`core.trust.issued`), so that it can be revoked once another one has taken its file's
    place. What ``ca.crl`` has is listed too, in case that list was lost.

    Raises
    ------
    ConfigError
        If the name cannot be a device's.
    StorageError
        If the file is an authority's or a server's certificate or a SuperNode's key, the list cannot be written, or it
        is missing and ``ca.crl`` cannot be read.
    """
    if keys.check_name(name).lower() in TAKEN:
        raise ConfigError(f"name {name!r}: files of the authority or the server have it. Choose another one.")
    _signing(authority, days, datetime.now(UTC))  # what is wrong shows before the lock makes a file in the folder
    with issued.locked(authority.public.parent):
        return _leaf(authority, folder, name, name, [x509.DNSName(name)], ExtendedKeyUsageOID.CLIENT_AUTH, days)


def signing_key(authority: KeyPair) -> ec.EllipticCurvePrivateKey:
    """Return an authority's private key; raise StorageError if it is away, open or none."""
    if not authority.private.exists():
        raise StorageError(f"{authority.private}: no such key file. Bring the authority's key back for this call.")
    return keys.read_key(authority.private)


def check_host(name: str) -> str:
    """Return the usual spelling of a name that a server's certificate can have, a host name or an IP address.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    found = _alternative(name).value
    return found if isinstance(found, str) else str(found)


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
    now = now or datetime.now(UTC)
    root, root_key = _signing(authority, days, now)
    tidy(private_folder(folder))
    tidy(authority.public.parent)
    pair = KeyPair(folder / f"{stem}.crt", folder / f"{stem}.key")
    refuse_link(pair.private)
    client = usage == ExtendedKeyUsageOID.CLIENT_AUTH
    if pair.private.with_suffix(".pub").exists():  # a device called X-node, in the folder of X
        raise StorageError(f"{pair.private}: the key of a SuperNode. Choose another folder or name.")
    replaced = _replaceable(pair.public, client)
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        fields.builder(fields.subject(common_name), root.subject, key.public_key(), days, root.not_valid_after_utc, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(fields.key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    if client:
        own = [] if replaced is None or not certificates.signed(replaced, root) else [replaced]
        record = authority.public.parent
        issued.add(record, [*own, certificate], revoked.known(record, root), root.not_valid_after_utc)
    keys.save(pair, certificate.public_bytes(codec.Encoding.PEM), key)
    return pair


def _signing(authority: KeyPair, days: int, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the authority's certificate and key if a certificate of `days` days from `now` can be signed with them."""
    if not 1 <= days <= MAX_LEAF_DAYS:
        raise ConfigError(f"days={days}: a certificate lives 1 to {MAX_LEAF_DAYS} days.")
    root, key = certificates.read_authority(authority.public), signing_key(authority)
    certificates.check_pair(root, key, authority)
    certificates.check_begun(authority.public)
    certificates.refuse_expired(authority.public, root, now)
    return root, key


def _replaceable(path: Path, client: bool) -> x509.Certificate | None:
    """Return the certificate that a new one, of a client or of the server, would replace; None if there is none.

    Raises
    ------
    StorageError
        If it is an authority's, or a server's that a client's would replace.
    """
    try:
        found = certificates.read_certificate(path)
    except StorageError:  # none, or a damaged one
        return None
    if certificates.is_authority(found):
        raise StorageError(f"{path}: the certificate of an authority. Choose another folder or name.")
    if client and certificates.serves(found):
        raise StorageError(f"{path}: the certificate of a server. Choose another folder or name.")
    return found


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        labels = name.split(".")
        if len(name) > 253 or not all(keys.NAME.fullmatch(label) for label in labels) or labels[-1].isdigit():
            raise ConfigError(f"server name {name!r}: neither an IP address nor a host name.") from None
        return x509.DNSName(name.lower())
