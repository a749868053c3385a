"""Private keys in files, and the key pairs with which SuperNodes authenticate themselves.

Every SuperNode has a key pair of its own (EC P-384, OpenSSH format, as ``ssh-keygen -t ecdsa -b 384`` makes it) that
the SuperLink knows by registration. Certificates are in :mod:`core.trust.certificates`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as codec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from fedcross.core.errors import ConfigError, StorageError, quoted, remedy
from fedcross.core.links import followed, refuse_link
from fedcross.core.private_files import check_private, private_folder
from fedcross.core.replacing import replacing_both

#: A device's name, or one part of a host's.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
#: The secret that a SuperExec shares with the SuperLink or SuperNode that it serves: bytes, no PEM.
SECRET = "superexec.key"  # noqa: S105 - a file name
LEAST_SECRET = 16


@dataclass(frozen=True)
class KeyPair:
    """Paths of a private key and of its public part (a certificate or an OpenSSH public key)."""

    public: Path
    private: Path


def check_name(name: str) -> str:
    """Return `name` if it can name a device: ASCII letters, digits, inner hyphens, 63 at most (files have it)."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: use a to z, A to Z, 0 to 9 and inner hyphens, at most 63 characters.")
    return name


def make_node_key(folder: Path, name: str, replace: bool = False) -> KeyPair:
    """Make the key pair with which a SuperNode authenticates itself: ``NAME-node.key`` and ``NAME-node.pub``.

    Raises
    ------
    StorageError
        If the key, or its public part alone, exists already and shall not be replaced: with a new key the SuperLink
        would treat the node as another one.
    """
    check_name(name)
    private_folder(folder)
    pair = KeyPair(folder / f"{name}-node.pub", folder / f"{name}-node.key")
    if pair.private.exists() and not replace:
        raise StorageError(f"{pair.private}: this node has a key already. Remove it first if it shall be replaced.")
    if pair.public.exists() and not replace:
        raise StorageError(lost_key(pair.public))
    key = ec.generate_private_key(ec.SECP384R1())
    save(pair, _public_line(key, name), key, codec.PrivateFormat.OpenSSH)
    return pair


def bundle_of(folder: Path) -> Path:
    """Return what ``rotate-key`` takes for a device with keys in `folder`: the folder above ``keys``, or `folder`."""
    return folder.parent if folder.resolve().name == "keys" else folder


def lost_key(public: Path) -> str:
    """Return what to say of a SuperNode's public key, the registered one perhaps, whose private key is away."""
    name, place = public.stem.removesuffix("-node"), bundle_of(public.parent)
    cure = "revoke this key and remove this file"
    if place.resolve().name == name or _is_only(public):
        cure = (
            f"fedcross deploy rotate-key {quoted(place)} makes a new one and keeps this file, whose key must be revoked"
        )
    return f"{public}: its private key {name}-node.key is away. Bring it back. If it is lost, {cure}."


def _is_only(public: Path) -> bool:
    """Return whether this is the only public key of a device in its bundle's folder, which may have any name."""
    return public.parent.resolve().name == "keys" and [*public.parent.glob("*-node.pub")] == [public]


def public_line(private: Path, name: str) -> bytes:
    """Return what the ``.pub`` file of a SuperNode's key says, from the private key; StorageError if it is none."""
    return _public_line(read_node_key(private), name)


def _public_line(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    line = key.public_key().public_bytes(codec.Encoding.OpenSSH, codec.PublicFormat.OpenSSH)
    return line + b" " + name.encode() + b"\n"


def check_secret(path: Path) -> Path:
    """Return `path` if this secret is long enough and only its owner can read it; else raise StorageError."""
    new = (
        "fedcross deploy federation makes a new one (in a device's bundle: fedcross deploy rotate-key --secret BUNDLE)"
    )
    try:
        check_private(path)
    except StorageError as error:
        if os.access(path.parent, os.X_OK) and not path.exists():
            raise StorageError(f"{path}: missing. Bring it back, or {new}.") from error
        raise
    size = path.stat().st_size
    if size < LEAST_SECRET:
        raise StorageError(f"{path}: {size} bytes, a secret has {LEAST_SECRET} or more. Remove it: {new}.")
    return path


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read an authority's private key, if only its owner can."""
    return _elliptic(load(check_private(path)), path)


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a SuperNode's private key, if it is one that Flower takes."""
    return _elliptic(load(path, ssh=True), path)


def read_public_key(path: Path) -> PublicKeyTypes:
    """Read an OpenSSH public key."""
    try:
        return codec.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: this key cannot be read ({error.strerror}).") from error
    except (ValueError, UnsupportedAlgorithm):  # their words repeat the content, which may be a secret
        raise StorageError(
            f"{path}: this is no OpenSSH public key. Bring it back, or remove it if its private key is there."
        ) from None


def again(private: Path) -> str:
    """Return what to do about a private key that is none, or another one's."""
    if private.name == "ca.key":
        return "Bring it back: without it nothing can be signed."
    if private.stem.endswith("-node"):
        return "Bring it back, or give the device a new one with fedcross deploy rotate-key."
    made_by = "federation" if private.name == "server.key" else "client"
    return f"Bring it back, or make a new pair: fedcross deploy {made_by}."


def _elliptic(key: PrivateKeyTypes, path: Path) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StorageError(f"{path}: an elliptic-curve key is needed, this is {type(key).__name__}. {again(path)}")
    return key


def load(path: Path, ssh: bool = False) -> PrivateKeyTypes:
    """Read an unencrypted private key, PEM or, with `ssh`, OpenSSH; raise StorageError if it is none."""
    form, load = ("OpenSSH", codec.load_ssh_private_key) if ssh else ("PEM", codec.load_pem_private_key)
    try:
        return load(path.read_bytes(), None)
    except PermissionError as error:
        raise StorageError(f"{path}: this key cannot be read ({error.strerror}). Run as its owner.") from error
    except OSError as error:
        raise StorageError(f"{path}: this key cannot be read ({error.strerror}). {again(path)}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StorageError(f"{path}: this is no unencrypted {form} private key ({error}). {again(path)}") from error


def save(
    pair: KeyPair,
    public: bytes,
    key: ec.EllipticCurvePrivateKey,
    form: codec.PrivateFormat = codec.PrivateFormat.PKCS8,
) -> None:
    """Write both files or, if one of them cannot be written, neither; a link for the private one is refused."""
    refuse_link(pair.private)
    modes = {pair.private: 0o600, followed(pair.public): 0o644}
    try:
        with replacing_both(modes) as (private, certificate):
            certificate.write(public)
            private.write(key.private_bytes(codec.Encoding.PEM, form, codec.NoEncryption()))
    except OSError as error:
        raise StorageError(
            f"{pair.public}, {pair.private.name}: cannot be written ({error.strerror}). {remedy(error).capitalize()}."
        ) from error
