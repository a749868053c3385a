"""Reads and checks the certificates of a federation: whose they are, who signed them, how long they last."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedcross.core import exposed
from fedcross.core.errors import StorageError
from fedcross.core.links import dangling
from fedcross.core.private_files import check_private

from . import cures, keys
from .keys import KeyPair

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


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
    refuse_expired(authority, root, now)  # what it signed cannot be made again
    return validity(certificate, now)


def validity(certificate: Path, now: datetime | None = None) -> timedelta:
    """Return how long `certificate` stays valid, whoever signed it; raise StorageError outside its dates."""
    leaf = read_certificate(certificate)
    now = now or datetime.now(UTC)
    check_begun(certificate, now)
    left = leaf.not_valid_after_utc - now
    if is_authority(leaf):
        refuse_expired(certificate, leaf, now)
    if left <= timedelta(0):
        cure = cures.expired(certificate, client=for_clients(leaf))
        raise StorageError(f"{certificate}: expired on {leaf.not_valid_after_utc:%F}. {cure}")
    return left


def refuse_expired(authority: Path, root: x509.Certificate, now: datetime | None = None) -> None:
    """Raise StorageError if an authority's certificate has expired."""
    end = root.not_valid_after_utc
    if (late := (now or datetime.now(UTC)) - end) >= timedelta(0):
        ago = f"{late.days} days ago by this clock"
        raise StorageError(
            f"{authority}: expired on {end:%F} ({ago}). Is this clock right? If it is: {cures.expired_root(authority)}"
        )


def check_begun(certificate: Path, now: datetime | None = None) -> None:
    """Raise StorageError if `certificate` is not valid yet, by this machine's clock."""
    found = read_certificate(certificate)
    begin = found.not_valid_before_utc
    if (now or datetime.now(UTC)) < begin:
        names = sorted(server_names(certificate)) if serves(found) else []
        cure = cures.early(certificate, root=is_authority(found), names=names)
        raise StorageError(f"{certificate}: valid from {begin:%F %T} UTC; is this clock right? If it is, {cure}")


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


def check_pair(certificate: x509.Certificate, key: PrivateKeyTypes, pair: KeyPair) -> None:
    """Raise StorageError if `key` is not that of `certificate`."""
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
            check_pair(root, keys.load(authority.private), authority)
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
        if said := dangling(path):
            raise StorageError(f"{said} Is its disk mounted? {cure}") from error
        raise StorageError(f"{path}: this certificate cannot be read ({error.strerror}). {cure}") from error
    except ValueError as error:
        raise StorageError(f"{path}: this is no PEM certificate ({error}). {cure}") from error


def one_certificate(path: Path) -> x509.Certificate:
    """Read a PEM certificate; raise StorageError if its file has further ones, of which none would be seen."""
    found = read_certificate(path)
    if (number := path.read_bytes().count(b"-----BEGIN CERTIFICATE-----")) > 1:
        raise StorageError(f"{path}: {number} certificates in one file. Give each a file of its own.")
    return found


def refuse_private(path: Path) -> None:
    """Raise StorageError if a certificate's file cannot be read, or has a private key too and others can read it."""
    read_certificate(path)
    if b"PRIVATE KEY-----" in path.read_bytes() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise StorageError(
            f"{path}: a private key is in it, and others on this machine can read it (mode "
            f"{stat.S_IMODE(path.stat().st_mode):o}). Leave the certificate alone in it. If somebody may have read it, "
            f"{exposed.replacement(path.with_suffix('.key'))}."
        )


def server_names(path: Path, cure: str = "") -> set[str]:
    """Return the host names and addresses in a certificate; errors as :func:`read_certificate`."""
    names = _extension(read_certificate(path, cure), x509.SubjectAlternativeName)
    if names is None:
        return set()
    addresses = names.get_values_for_type(x509.IPAddress)
    return {*map(str.lower, names.get_values_for_type(x509.DNSName)), *(str(address) for address in addresses)}


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


def serves(certificate: x509.Certificate) -> bool:
    """Return whether a server can use `certificate`, whoever else can."""
    return ExtendedKeyUsageOID.SERVER_AUTH in _usages(certificate)


def for_servers(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` is one of a server, and of no client."""
    return serves(certificate) and not for_clients(certificate)


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
