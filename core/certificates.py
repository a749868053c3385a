"""Certificates of a federation.

An offline certificate authority (CA, EC P-256, may sign no further authority) signs the server's certificate and,
where a gateway asks for them, the devices' client certificates. Leaf certificates live for at most 90 days; signing
again with the same CA rotates them without touching the devices. SuperNodes have no certificates: their keys are in
:mod:`core.keys`.

This module does not use Flower; both the ``superlink`` engine and the compose federation call these functions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedcross.core import certificate_fields, cures, issued, keys, revoked
from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.keys import KeyPair
from fedcross.core.private_files import alone, check_private, private_folder, tidy

MAX_LEAF_DAYS = 90
AUTHORITY_DAYS = 730
MAX_AUTHORITY_DAYS = 36500
LOOPBACK = ("localhost", "127.0.0.1")
#: Files of the authority and of the server have these names; no device can.
TAKEN = ("ca", "server", "superexec")
_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


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
        _refuse_expired(pair.public, one_certificate(pair.public))
        raise StorageError(f"{pair.public}: an authority exists here already. Use it, or choose another folder.")
    if pair.private.exists():
        raise StorageError(
            f"{pair.private}: an authority's key without its {pair.public.name}. Bring that back, or remove the key if "
            "no device has the certificate, or it has expired."
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = certificate_fields.subject("fedcross certificate authority")
    certificate = (
        certificate_fields.builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(certificate_fields.key_usage(authority=True), critical=True)
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
    """Make, or rotate, the client certificate ``NAME.crt`` with its key ``NAME.key`` (mutual TLS at the gateway).

    The authority lists it (:mod:`core.issued`), so that it can be revoked once another one has taken its file's place.
    What ``ca.crl`` has is listed too, in case that list was lost.

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


def check_certificate(certificate: Path, authority: Path, now: datetime | None = None) -> timedelta:
    """Return how long `certificate` stays valid.

    Raises
    ------
    StorageError
        If it cannot be read, is not signed by `authority`, has expired or is not yet valid.
    """
    leaf, root = read_certificate(certificate), read_certificate(authority)
    if not signed(leaf, root):
        cure = cures.unsigned(authority, root=is_authority(leaf), client=for_clients(leaf))
        raise StorageError(f"{certificate}: not signed by {authority}. {cure}")
    _refuse_expired(authority, root, now)  # what it signed cannot be made again
    return validity(certificate, now)


def validity(certificate: Path, now: datetime | None = None) -> timedelta:
    """Return how long `certificate` stays valid, whoever signed it; raise StorageError outside its dates."""
    leaf = read_certificate(certificate)
    now = now or datetime.now(UTC)
    check_begun(certificate, now)
    left = leaf.not_valid_after_utc - now
    if is_authority(leaf):
        _refuse_expired(certificate, leaf, now)
    if left <= timedelta(0):
        raise StorageError(
            f"{certificate}: expired on {leaf.not_valid_after_utc:%F}. {cures.expired(for_clients(leaf))}"
        )
    return left


def _refuse_expired(authority: Path, root: x509.Certificate, now: datetime | None = None) -> None:
    """Raise StorageError if an authority's certificate has expired."""
    end = root.not_valid_after_utc
    if (late := (now or datetime.now(UTC)) - end) >= timedelta(0):
        ago = f"{late.days} days ago by this clock"
        raise StorageError(f"{authority}: expired on {end:%F} ({ago}). {cures.expired_root(authority)}")


def check_begun(certificate: Path, now: datetime | None = None) -> None:
    """Raise StorageError if `certificate` is not valid yet, by this machine's clock."""
    begin = read_certificate(certificate).not_valid_before_utc
    if (now or datetime.now(UTC)) < begin:
        raise StorageError(
            f"{certificate}: valid from {begin:%F %T} UTC; is this clock right? If it is, make this certificate again "
            "with fedcross deploy."
        )


def check_key(path: Path, certificates: Sequence[Path] = ()) -> Path:
    """Return `path` if only its owner can read this key, and what has its name beside it, if anything, is its own.

    Parameters
    ----------
    path : Path
        A certificate's key, a SuperNode's (``NAME-node.key``) or the secret ``superexec.key``.
    certificates : sequence of Path
        Certificates of which one must be the key's own; none if that is not known.

    Raises
    ------
    StorageError
        If others can read it, it is no key, or it belongs to another certificate or public key.
    """
    if path.name == keys.SECRET:
        return keys.check_secret(path)
    check_private(path)
    certificate, public = path.with_suffix(".crt"), path.with_suffix(".pub")
    node = path.stem.endswith("-node") and not certificate.exists()
    key = keys.read_node_key(path) if node else keys.load(path)
    if certificate.exists() and read_certificate(certificate).public_key() != key.public_key():
        both = "One of the two is another authority's: fedcross deploy federation says which."
        raise _not_of(KeyPair(certificate, path), both if path.name == "ca.key" else "")
    if public.exists() and keys.read_public_key(public) != key.public_key():
        raise StorageError(
            f"{path}: this is not the key of {public}. Bring the right one back, or remove that one and give the "
            "device a new key with fedcross deploy rotate-key."
        )
    if certificates and all(read_certificate(one).public_key() != key.public_key() for one in certificates):
        raise _not_of(KeyPair(certificates[0], path))
    return path


def _check_pair(certificate: x509.Certificate, key: PrivateKeyTypes, pair: KeyPair) -> None:
    if certificate.public_key() != key.public_key():
        raise _not_of(pair)


def _not_of(pair: KeyPair, cure: str = "") -> StorageError:
    return StorageError(f"{pair.private}: this is not the key of {pair.public}. {cure or keys.again(pair.private)}")


def check_authority(authority: KeyPair) -> None:
    """Check an authority's certificate, and its key if that is there: nothing is signed without it.

    Raises
    ------
    StorageError
        If the certificate is no authority's or not valid yet, or the key is open, damaged or another one's.
    """
    root = read_authority(authority.public)
    check_begun(authority.public)
    if authority.private.exists():
        check_private(authority.private)
        try:
            _check_pair(root, keys.load(authority.private), authority)
        except StorageError as error:
            raise StorageError(f"{error} If it is lost, move {authority.private} away: all else works.") from error


def read_authority(path: Path) -> x509.Certificate:
    """Read an authority's PEM certificate; raise StorageError if it is another one's."""
    found = one_certificate(path)
    if not is_authority(found):
        raise StorageError(f"{path}: not the certificate of an authority. Give the federation's ca.crt.")
    return found


def authority_text(path: Path) -> bytes:
    """Return an authority's certificate as PEM, and nothing else that its file has, such as a private key."""
    return read_authority(path).public_bytes(codec.Encoding.PEM)


def read_certificate(path: Path, cure: str = "") -> x509.Certificate:
    """Read a PEM certificate; the error, if it is none, ends with `cure`, or what is usual for a file of this name."""
    cure = cure or cures.lost(path)
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except PermissionError as error:
        raise StorageError(f"{path}: this certificate cannot be read ({error.strerror}). Run as its owner.") from error
    except OSError as error:
        raise StorageError(f"{path}: this certificate cannot be read ({error.strerror}). {cure}") from error
    except ValueError as error:
        raise StorageError(f"{path}: this is no PEM certificate ({error}). {cure}") from error


def one_certificate(path: Path) -> x509.Certificate:
    """Read a PEM certificate; raise StorageError if its file has further ones, of which none would be seen."""
    found = read_certificate(path)
    if (number := path.read_bytes().count(b"-----BEGIN CERTIFICATE-----")) > 1:
        raise StorageError(f"{path}: {number} certificates in one file. Give each a file of its own.")
    return found


def server_names(path: Path, cure: str = "") -> set[str]:
    """Return the host names and addresses in a certificate; errors as :func:`read_certificate`."""
    names = _extension(read_certificate(path, cure), x509.SubjectAlternativeName)
    if names is None:
        return set()
    addresses = names.get_values_for_type(x509.IPAddress)
    return {*names.get_values_for_type(x509.DNSName), *(str(address) for address in addresses)}


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
    private_folder(folder)
    pair = KeyPair(folder / f"{stem}.crt", folder / f"{stem}.key")
    client = usage == ExtendedKeyUsageOID.CLIENT_AUTH
    if pair.private.with_suffix(".pub").exists():  # a device called X-node, in the folder of X
        raise StorageError(f"{pair.private}: the key of a SuperNode. Choose another folder or name.")
    replaced = _replaceable(pair.public, client)
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        certificate_fields.builder(
            certificate_fields.subject(common_name), root.subject, key.public_key(), days, root.not_valid_after_utc, now
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(certificate_fields.key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(root_key, hashes.SHA256())
    )
    if client:
        own = [] if replaced is None or not signed(replaced, root) else [replaced]
        record = authority.public.parent
        issued.add(record, [*own, certificate], revoked.known(record, root), root.not_valid_after_utc)
    keys.save(pair, certificate.public_bytes(codec.Encoding.PEM), key)
    return pair


def _signing(authority: KeyPair, days: int, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the authority's certificate and key if a certificate of `days` days from `now` can be signed with them."""
    if not 1 <= days <= MAX_LEAF_DAYS:
        raise ConfigError(f"days={days}: a certificate lives 1 to {MAX_LEAF_DAYS} days.")
    root, key = read_authority(authority.public), signing_key(authority)
    _check_pair(root, key, authority)
    check_begun(authority.public)
    _refuse_expired(authority.public, root, now)
    return root, key


def signing_key(authority: KeyPair) -> ec.EllipticCurvePrivateKey:
    """Return an authority's private key; raise StorageError if it is away, open or none."""
    if not authority.private.exists():
        raise StorageError(f"{authority.private}: no such key file. Bring the authority's key back for this call.")
    return keys.read_key(authority.private)


def _replaceable(path: Path, client: bool) -> x509.Certificate | None:
    """Return the certificate that a new one, of a client or of the server, would replace; None if there is none.

    Raises
    ------
    StorageError
        If it is an authority's, or a server's that a client's would replace.
    """
    try:
        found = read_certificate(path)
    except StorageError:  # none, or a damaged one
        return None
    if is_authority(found):
        raise StorageError(f"{path}: the certificate of an authority. Choose another folder or name.")
    if client and ExtendedKeyUsageOID.SERVER_AUTH in _usages(found):
        raise StorageError(f"{path}: the certificate of a server. Choose another folder or name.")
    return found


def signed(leaf: x509.Certificate, root: x509.Certificate) -> bool:
    """Return whether the authority with the certificate `root` signed `leaf`."""
    try:
        leaf.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def for_clients(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` is one of a client."""
    return ExtendedKeyUsageOID.CLIENT_AUTH in _usages(certificate)


def for_servers(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` is one of a server, and of no client."""
    return ExtendedKeyUsageOID.SERVER_AUTH in _usages(certificate) and not for_clients(certificate)


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` is an authority's."""
    constraints = _extension(certificate, x509.BasicConstraints)
    return constraints is not None and constraints.ca


def _extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, ValueError):
        return None


def _usages(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(_extension(certificate, x509.ExtendedKeyUsage) or ())


def check_host(name: str) -> str:
    """Return `name` if a server's certificate can have it, a host name or an IP address; else raise ConfigError."""
    _alternative(name)
    return name


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        labels = name.split(".")
        if len(name) > 253 or not all(keys.NAME.fullmatch(label) for label in labels) or labels[-1].isdigit():
            raise ConfigError(f"server name {name!r}: neither an IP address nor a host name.") from None
        return x509.DNSName(name)
