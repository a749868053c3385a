"""The client certificates that an authority has signed, in ``issued.json`` beside its own certificate.

A rotated certificate stays valid until its end, so revoking a device means to revoke each one that it got. The server's
certificates are not in it. A folder that an earlier version made has no such file until its next client certificate.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from fedcross.core.errors import StorageError
from fedcross.core.private_files import write_private

FILE = "issued.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Issued:
    """The serial number of a client certificate, the device's name in it, and when it ends."""

    serial: int
    name: str
    until: datetime


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the authority's lists in `folder` inside the block; wait for them before.

    Raises
    ------
    StorageError
        If `folder` cannot be written.
    """
    from filelock import FileLock

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire()
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot be written ({error.strerror}). The authority keeps its lists of certificates there."
        ) from error
    try:
        yield
    finally:
        lock.release()


def of(certificate: x509.Certificate) -> Issued:
    """Return what the list keeps of `certificate`."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(names[0].value) if names else ""
    return Issued(certificate.serial_number, name, certificate.not_valid_after_utc)


def valid(folder: Path) -> list[Issued]:
    """Return the listed certificates that have not expired; none if there is no list.

    Raises
    ------
    StorageError
        If the list cannot be read.
    """
    path = folder / FILE
    try:
        told = json.loads(path.read_bytes())
        found = [Issued(int(one["serial"], 16), one["name"], datetime.fromisoformat(one["until"])) for one in told]
        return [one for one in found if one.until > datetime.now(UTC)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{path}: no readable list of certificates ({error}). Bring it back from a copy; without it, only the "
            "certificates whose files you name can be revoked."
        ) from error


def add(folder: Path, certificates: Sequence[x509.Certificate]) -> None:
    """Put `certificates` on the list, and take expired ones off; call it inside :func:`locked`."""
    found = {one.serial: one for one in [*valid(folder), *map(of, certificates)]}
    told = [{"serial": f"{one.serial:x}", "name": one.name, "until": one.until.isoformat()} for one in found.values()]
    write_private(folder / FILE, json.dumps(told, indent=1).encode() + b"\n")
