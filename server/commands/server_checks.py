"""Checks of ``fedcross doctor`` at the server: what its programs serve, and which revoked keys its database lets in."""

from __future__ import annotations

import contextlib
import sqlite3
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from fedcross.core.errors import StorageError
from fedcross.server.commands.device_checks import AWAY, CONNECT_S, DOOR, LONGEST, REFUSED, UNKNOWN, signed_call
from fedcross.server.commands.findings import Finding, fault, note, ok

if TYPE_CHECKING:
    from cryptography import x509

RESTART = "Restart the SuperLink and the gateway."
#: Flower's word for a node whose key is revoked.
UNREGISTERED = "unregistered"


def check_served(address: str, folders: Sequence[Path]) -> Iterator[Finding]:
    """Check that HOST:PORT serves the ``server.crt`` of one of `folders`, and that its gateway's token is known.

    Nothing is said of an address where no TLS is, or if no folder has a ``server.crt``.
    """
    from cryptography.x509 import load_der_x509_certificate

    from fedcross.core.trust.certificates import read_certificate

    own: dict[Path, x509.Certificate] = {}
    for folder in folders:
        with suppress(StorageError):  # none, or one that check_keys tells of
            own[folder] = read_certificate(folder / "server.crt")
    if not own:
        return
    host, _, port = address.rpartition(":")
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # the certificate is compared, byte for byte
    with closing(HTTPSConnection(host.strip("[]"), int(port), timeout=CONNECT_S, context=trust)) as connection:
        try:
            connection.connect()
        except OSError as error:
            alert = isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
            said = "refuses TLS, as a gateway does that asks for a client's certificate" if alert else "speaks no TLS"
            yield note(f"{address}: {said} ({error}), so no certificate is compared with server.crt.")
            return
        served = load_der_x509_certificate(connection.sock.getpeercert(binary_form=True) or b"")
        found = [folder for folder, certificate in own.items() if certificate == served]
        if not found:
            yield _another(address, served, *next(iter(own.items())))
            return
        yield ok(f"{address} serves {found[0] / 'server.crt'}")
        with suppress(OSError, HTTPException):  # a gateway of another kind, which asks for a client's certificate
            yield from _token(address, connection, found[0])


def _another(address: str, served: x509.Certificate, folder: Path, own: x509.Certificate) -> Finding:
    """Return the finding about a served certificate that is not the one in `folder`."""
    from fedcross.core.trust.certificates import read_certificate, signed

    ours = False
    with suppress(StorageError):
        ours = signed(served, read_certificate(folder / "ca.crt"))
    dates = [f"until {one.not_valid_after_utc:%F}, serial number {one.serial_number:x}" for one in (served, own)]
    said = f"{address}: serves another certificate ({dates[0]}) than {folder / 'server.crt'} ({dates[1]})"
    if ours:
        return fault(f"{said}: its programs read that file at their start only. {RESTART}")
    said += f", and {folder / 'ca.crt'} did not sign it"
    return fault(f"{said}. Is this the address of the gateway? If it is: {RESTART}")


def _token(address: str, connection: HTTPSConnection, folder: Path) -> Iterator[Finding]:
    """Ask through the gateway, or the SuperLink itself, whether the gateway's calls count, with a key nobody knows.

    The gateway brings its own token in place of the one in `folder`, with which the SuperLink itself is asked.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    from fedcross.deploy import tokens
    from fedcross.engines.executor.entry import GATEWAY
    from fedcross.engines.executor.fleet import NO_GATEWAY

    body, headers = signed_call(ec.generate_private_key(ec.SECP384R1()))
    file = folder / tokens.GATEWAY
    with suppress(StorageError):  # check_keys tells of it
        headers[GATEWAY] = tokens.check(file)
    connection.request("POST", DOOR, body=body, headers=headers)
    reply = connection.getresponse()
    said = reply.read(LONGEST).decode(errors="replace")
    if reply.status == REFUSED and NO_GATEWAY in said:
        yield fault(
            f"{address}: the SuperLink does not take the gateway's calls, so no device gets in: two different "
            f"gateway.token. Both read {file} at their start only. {RESTART}"
        )
    elif reply.status == UNKNOWN:
        yield ok(f"{address}: the SuperLink takes the gateway's calls")
    elif reply.status in AWAY:
        yield note(f"{address}: answers {reply.status}. If this is the gateway: its SuperLink does not answer it.")


def check_database(path: Path) -> Iterator[Finding]:
    """Check that the database and its record of revoked keys agree, as the SuperLink makes them do at its start."""
    from fedcross.deploy import start
    from fedcross.engines.executor import recorded

    record = recorded.beside(path)
    if not path.exists():
        yield fault(f"{path}: no such database. Name the file that the SuperLink gets with --database.")
        return
    try:
        start.check_database(path)
        told = recorded.read(record)
        known = _keys(path)
    except (StorageError, ValueError) as error:
        yield fault(str(error))
        return
    except sqlite3.Error as error:
        yield fault(f"{path}: cannot be read ({error}). Run as the owner of the SuperLink's database.")
        return
    if said := recorded.open_folder(path):
        yield fault(said)
    if record.exists() and record.stat().st_uid != path.stat().st_uid and (said := recorded.strangers(record)):
        yield fault(f"{record}: {said}. Only its owner can read it, and another one can change what is revoked.")
    revoked = {key for key, status in known.items() if status == UNREGISTERED}
    if entered := [key for key in told if key not in revoked]:
        yield fault(
            f"{path}: does not have {len(entered)} of the {len(told)} keys as revoked that {record} records, as an "
            f"older copy or a new file does ({_names(entered)}). Restart the SuperLink, which revokes them again; then "
            "register the devices that were registered since that copy."
        )
    if lacks := [key for key in revoked if key not in told]:
        yield fault(
            f"{record}: {'lacks' if told else 'missing, or lacks'} {len(lacks)} of the {len(revoked)} keys that "
            f"{path} has as revoked ({_names(lacks)}), so an older copy of it would let them in. Restart the "
            "SuperLink, which records them."
        )
    if not entered and not lacks:
        yield ok(f"{path}: registered keys {len(known) - len(revoked)}; revoked {len(revoked)}, all in {record.name}")


def _names(keys: Iterable[bytes]) -> str:
    from fedcross.core.trust.admission import fingerprint

    return ", ".join(sorted(map(fingerprint, keys))[:10])


def _keys(path: Path) -> dict[bytes, str]:
    """Return the keys that the database knows and what it says of each; none if the SuperLink has not started yet."""
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'node'").fetchone():
            return {}
        rows = database.execute("SELECT public_key, status FROM node WHERE public_key IS NOT NULL")
        return {bytes(key): str(status) for key, status in rows}
