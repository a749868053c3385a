"""The client certificates that an authority has signed, in ``issued.json`` beside its own certificate.

A rotated certificate stays valid until its end, so revoking a device means to revoke each one that it got. The server's
certificates are not in it. A folder that an earlier version made has no such file until the next one is signed or
revoked. The file also says which are revoked, so that a lost ``ca.crl`` can be made again; an earlier version's does
not.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from fedcross.core.errors import StorageError, quoted
from fedcross.core.links import dangling
from fedcross.core.private_files import write_record
from fedcross.core.replacing import inherit

FILE = "issued.json"
LOCK = ".lock"
#: How long a certificate stays on the list after its end. As long as an authority lives, unless it was made for longer:
#: no clock with which it can sign takes one off that is valid.
KEPT = timedelta(days=730)


@dataclass(frozen=True)
class Issued:
    """The serial number of a client certificate, the device's name in it, when it ends, and since when it is revoked.

    The name is "" if only the number is known.
    """

    serial: int
    name: str
    until: datetime
    revoked: datetime | None = None


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
    if (folder / LOCK).is_symlink():
        raise StorageError(f"{folder / LOCK}: a link in the place of a lock. Remove it: rm {quoted(folder / LOCK)}")
    try:
        lock.acquire()
        inherit(folder / LOCK, folder)
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


def kept(folder: Path) -> list[Issued]:
    """Return the listed certificates, but those that have ended :data:`KEPT` ago; none if there is no list.

    Raises
    ------
    StorageError
        If the list cannot be read.
    """
    path = folder / FILE
    try:
        told = json.loads(path.read_bytes())
        if not isinstance(told, list):
            raise TypeError(f"a list, not {type(told).__name__}")
        return [one for one in map(_read, told) if one.until + KEPT > datetime.now(UTC)]
    except FileNotFoundError as error:
        if said := dangling(path):
            raise StorageError(
                f"{said} Is its disk mounted? If that never was there: echo '[]' > {quoted(os.path.realpath(path))}"
            ) from error
        return []
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read ({error.strerror}). Run as the owner of the authority's folder."
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(
            f"{path}: no readable list of certificates ({error}). Bring it back from a copy, or remove it: then only "
            "the certificates whose files you name can be revoked."
        ) from error


def _read(told: dict[str, str]) -> Issued:
    revoked = datetime.fromisoformat(told["revoked"]) if "revoked" in told else None
    return Issued(int(told["serial"], 16), told["name"], datetime.fromisoformat(told["until"]), revoked)


def _told(one: Issued) -> dict[str, str]:
    revoked = {} if one.revoked is None else {"revoked": one.revoked.isoformat()}
    return {"serial": f"{one.serial:x}", "name": one.name, "until": one.until.isoformat(), **revoked}


def add(
    folder: Path, certificates: Sequence[x509.Certificate], revoked: Mapping[int, datetime], latest: datetime
) -> None:
    """Put `certificates` on the list, and take off those that ended long ago; call it inside :func:`locked`.

    `revoked` is what the list of revoked ones has, which a record that was lost or is an older copy may lack;
    `latest` as :func:`with_revoked` takes it.
    """
    found = {one.serial: one for one in kept(folder)}
    for one in map(of, certificates):
        found.setdefault(one.serial, one)
    before = {serial: one.revoked for serial, one in found.items() if one.revoked is not None}
    write(folder, with_revoked(found, {**before, **revoked}, latest))


def with_revoked(known: Mapping[int, Issued], revoked: Mapping[int, datetime], latest: datetime) -> list[Issued]:
    """Return `known` with what is revoked; one of which only the number is known counts until `latest`."""
    unknown = {serial: Issued(serial, "", latest) for serial in revoked if serial not in known}
    return [replace(one, revoked=revoked.get(serial)) for serial, one in {**known, **unknown}.items()]


def write(folder: Path, certificates: Iterable[Issued]) -> None:
    """Write the list anew; call it inside :func:`locked`."""
    write_record(folder / FILE, json.dumps([_told(one) for one in certificates], indent=1).encode() + b"\n")
