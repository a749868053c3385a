"""Keys of a federation in one folder: authority, server, one folder for each device of this machine.

::

    KEYS/authority/  ca.crt ca.key                                 keep it off the server; needed to renew certificates
    KEYS/server/     ca.crt server.crt server.key superexec.key operator.token page.token NAME-node.pub
    KEYS/NAME/       ca.crt NAME-node.key NAME-node.pub superexec.key
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.files import private_folder, write_private, write_public
from fedcross.core.settings import node_name
from fedcross.engines.certificates import KeyPair, make_authority, make_node_key, make_server, read_certificate

#: Names of the server inside the compose and Kubernetes federations.
INNER_NAMES = ("superlink", "gateway", "localhost", "127.0.0.1")
#: A certificate with less time left is renewed by `init`, and named by `start`, `status` and `doctor`.
EXPIRES_SOON = timedelta(days=14)
OPERATOR, PAGE, SECRET = "operator.token", "page.token", "superexec.key"
#: Folders that are no device's.
_RESERVED = ("authority", "server")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def init(folder: Path, devices: Sequence[str] = (), names: Sequence[str] = ()) -> list[Path]:
    """Make what is missing in `folder` and renew a server certificate that expires soon; return the new files.

    Device i of `devices` gets a key here and trains partition i. `names` are further host names and addresses of the
    gateway, as devices reach it. ConfigError if a name cannot be a device's, StorageError if a file cannot be read.
    """
    made: list[Path] = []
    authority = KeyPair(folder / "authority" / "ca.crt", folder / "authority" / "ca.key")
    server = private_folder(folder / "server")
    if not authority.public.exists():
        made += make_authority(authority.public.parent)
    certificate = server / "server.crt"
    if (
        not certificate.exists()
        or expires_soon(certificate)
        or not {*INNER_NAMES, *names} <= set(names_in(certificate))
    ):
        made += renew(folder, names)
    _missing(server / "ca.crt", authority.public.read_bytes(), made)
    for name in (OPERATOR, PAGE):
        _missing(server / name, secrets.token_urlsafe(32).encode(), made)
    _missing(server / SECRET, secrets.token_bytes(32), made)
    for partition, device in enumerate(devices):
        made += add_device_keys(authority.public, folder / check_name(device), device, partition)
        public = f"{device}-node.pub"
        write_public(server / public, (folder / device / public).read_bytes())
    return made


def renew(folder: Path, names: Sequence[str] = ()) -> KeyPair:
    """Make a new server certificate for the names of the old one and for `names`."""
    authority = KeyPair(folder / "authority" / "ca.crt", folder / "authority" / "ca.key")
    certificate = folder / "server" / "server.crt"
    before = names_in(certificate) if certificate.exists() else []
    return make_server(authority, folder / "server", list(dict.fromkeys([*INNER_NAMES, *before, *names])))


def add_device_keys(authority: Path, folder: Path, name: str, partition: int) -> list[Path]:
    """Make what is missing of a device's keys in `folder`; return the new files.

    The comment of its public key names the device and its partition, for :func:`deploy.control.register`.
    """
    made: list[Path] = []
    _missing(private_folder(folder) / "ca.crt", authority.read_bytes(), made)
    if not (folder / f"{name}-node.key").exists():
        made += make_node_key(folder, name, f"{name} {node_name(partition)}")
    _missing(folder / SECRET, secrets.token_bytes(32), made)
    return made


def _missing(path: Path, content: bytes, made: list[Path]) -> None:
    """Write a file unless it is there: certificates for everybody, secrets for their owner."""
    if not path.exists():
        (write_public if path.suffix == ".crt" else write_private)(path, content)
        made.append(path)


def check_name(name: str) -> str:
    """Return `name` if it can be a device's: a host name of at most 32 characters; else raise ConfigError."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigError(
            f"device {name!r}: give up to 32 lower-case letters, digits and inner hyphens, and not "
            f"{' or '.join(_RESERVED)}."
        )
    return name


def names_in(certificate: Path) -> list[str]:
    """Return the host names and addresses in a server certificate."""
    found = read_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def time_left(certificate: Path) -> timedelta:
    """Return for how long a certificate is still valid."""
    return read_certificate(certificate).not_valid_after_utc - datetime.now(UTC)


def expires_soon(certificate: Path) -> str:
    """Return what to do about a certificate that has expired or will within 14 days; "" of another one."""
    left = time_left(certificate)
    if left > EXPIRES_SOON:
        return ""
    cure = "Make a new federation: fedcross deploy init." if certificate.name == "ca.crt" else "fedcross deploy renew."
    if left < timedelta():
        return f"{certificate}: expired {-left.days} days ago. {cure}"
    return f"{certificate}: expires in {left.days} days. {cure}"


def check_present(*paths: Path) -> None:
    """Raise StorageError for the first of `paths` that is missing or that this user cannot read."""
    for path in paths:
        try:
            path.open("rb").close()
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}. fedcross deploy init or add-device makes it.") from error
