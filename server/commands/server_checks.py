"""Checks of ``fedcross doctor`` at the server: what its programs serve, and which revoked keys its database lets in."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from fedcross.core.errors import ConfigError, StorageError
from fedcross.server.commands.device_checks import (
    AWAY,
    CONNECT_S,
    DOOR,
    LONGEST,
    MEDIA,
    REFUSED,
    UNKNOWN,
    signed_call,
)
from fedcross.server.commands.findings import Finding, fault, note, ok

if TYPE_CHECKING:
    from cryptography import x509

#: Calls a path with a body and headers, and returns the status and the text of the reply.
Ask = Callable[[str, bytes, dict[str, str]], tuple[int, str]]

RESTART = "Restart the SuperLink and the gateway."
#: A call of the control interface that changes nothing.
NODES = "/v1/control/list-nodes"
#: Status of a call that is taken; from FAILED on, of one that the SuperLink could not answer.
TAKEN, FAILED = 200, 500
#: Flower's word for a node whose key is revoked.
UNREGISTERED = "unregistered"


def check_served(address: str, folders: Sequence[Path]) -> Iterator[Finding]:
    """Check that HOST:PORT serves the ``server.crt`` of one of `folders`, and which tokens its SuperLink asks for.

    Nothing is said of an address where no TLS is, or if no folder has a ``server.crt``. Who does not serve it gets no
    token.
    """
    from cryptography.x509 import load_der_x509_certificate

    from fedcross.core.trust.certificates import read_certificate

    own: dict[Path, x509.Certificate] = {}
    for folder in folders:
        with suppress(StorageError):  # none, or one that check_keys tells of
            own[folder] = read_certificate(folder / "server.crt")
    if not own:
        return
    try:
        with _connected(address) as connection:
            served = load_der_x509_certificate(connection.sock.getpeercert(binary_form=True) or b"")
    except OSError as error:
        alert = isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
        said = "refuses TLS, as a gateway does that asks for a client's certificate" if alert else "speaks no TLS"
        yield note(f"{address}: {said} ({error}), so no certificate is compared with server.crt.")
        return
    found = [folder for folder, certificate in own.items() if certificate == served]
    if not found:
        yield _another(address, served, *next(iter(own.items())))
        return
    yield ok(f"{address} serves {found[0] / 'server.crt'}")

    def ask(path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        with _connected(address) as connection:
            if load_der_x509_certificate(connection.sock.getpeercert(binary_form=True) or b"") != served:
                raise ConnectionError("another program answers now")
            connection.request("POST", path, body=body, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read(LONGEST).decode(errors="replace")

    with suppress(OSError, HTTPException):  # a gateway of another kind, which asks for a client's certificate
        yield from _token(address, ask, found[0])
        yield from _guarded(address, ask, found[0], folders)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[HTTPSConnection]:
    """Yield a connection; who answers is not looked at: the certificate is compared, byte for byte."""
    host, _, port = address.rpartition(":")
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    with closing(HTTPSConnection(host.strip("[]"), int(port), timeout=CONNECT_S, context=trust)) as connection:
        connection.connect()
        yield connection


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
    return fault(
        f"{said}. Is this the address of the gateway, and {folder} this federation's? Compare its ca.crt with "
        "keys/public/ca.crt and with the devices'. Restart nothing before: with another authority's certificate no "
        "device gets in. Only if the authority was changed, give its ca.crt to all devices, then restart the SuperLink "
        "and the gateway."
    )


def _token(address: str, ask: Ask, folder: Path) -> Iterator[Finding]:
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
    status, said = ask(DOOR, body, headers)
    if status == REFUSED and NO_GATEWAY in said:
        if ask(NODES, b"", {"Content-Type": MEDIA})[0] not in (TAKEN, REFUSED):  # a gateway, which passes it not on
            yield fault(
                f"{address}: the SuperLink does not take the gateway's calls, so no device gets in: two different "
                f"gateway.token. Both read {file} at their start only. {RESTART}"
            )
        elif GATEWAY in headers:
            yield fault(
                f"{address}: the SuperLink does not take the token in {file}: it read another one at its start. If the "
                "gateway has that one too, devices get in still. Restart both together, so that they read the file."
            )
    elif status == UNKNOWN:
        yield ok(f"{address}: the SuperLink takes the gateway's calls")
    elif status in AWAY:
        yield note(f"{address}: answers {status}. If this is the gateway: its SuperLink does not answer it.")


def _guarded(address: str, ask: Ask, folder: Path, folders: Sequence[Path]) -> Iterator[Finding]:
    """Check that the SuperLink, if this is its own address, asks an operator and a device for the tokens in the files.

    A gateway passes no operator's call on (it answers 403), and brings its own token with a device's.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    from fedcross.deploy import tokens
    from fedcross.deploy.start import DOCS
    from fedcross.engines.executor import operators
    from fedcross.engines.executor.fleet import NO_GATEWAY

    headers = {"Content-Type": MEDIA}
    status, said = ask(NODES, b"", headers)
    closed = status == REFUSED and operators.WHY in said
    if not closed and status != TAKEN:
        return
    if closed:
        yield ok(f"{address}: no run is started or stopped without the operator's token")
    else:
        yield fault(
            f"{address}: who reaches it can start and stop runs and register devices: the SuperLink was started "
            f"without {operators.VARIABLE}. Set it, and restart the SuperLink ({DOCS})."
        )
    found = _operators(folders) if closed else {}
    asked = {name: ask(NODES, b"", headers | {operators.HEADER: own})[0] for own, name in found.items()}
    good = [name for name, status in asked.items() if status == TAKEN]
    for name, status in asked.items():
        if status == TAKEN:
            yield ok(f"{address}: the SuperLink takes the operator's token in {name}")
        elif status == REFUSED:
            yield fault(
                f"{address}: the SuperLink does not take the operator's token in {name}. {_instead(name, good)}"
            )
    body, signed = signed_call(ec.generate_private_key(ec.SECP384R1()))
    status, said = ask(DOOR, body, signed)
    if status < FAILED and not (status == REFUSED and NO_GATEWAY in said):
        file = folder / tokens.GATEWAY
        yield fault(
            f"{address}: who reaches it can call as a device, past the gateway: the SuperLink has read no {file} at "
            f"its start. If it is missing: fedcross deploy federation. {RESTART}"
        )


def _instead(name: str, good: Sequence[str]) -> str:
    """Return what to do about an operator's token in the file `name`, when the SuperLink takes those in `good`."""
    from fedcross.engines.executor import operators

    if good and name == os.environ.get(operators.VARIABLE):
        return f"It takes that in {good[0]}, so {operators.VARIABLE} names the wrong file: name that one."
    return (
        "It has read another one at its start. If this one was made anew since, restart the SuperLink: until then the "
        f"old one counts, also if it has leaked. Else name the right file in {operators.VARIABLE}."
    )


def _operators(folders: Sequence[Path]) -> dict[str, str]:
    """Return the operator's tokens at hand, the environment's and those in `folders`, and the file of each."""
    from fedcross.deploy import tokens
    from fedcross.deploy.federation import OPERATOR, TOKEN
    from fedcross.engines.executor import operators

    found: dict[str, str] = {}
    with suppress(ValueError):  # check_tokens tells of it
        if own := operators.token(os.environ):
            found[own] = os.environ[operators.VARIABLE]
    for folder in folders:
        if folder.resolve().name == OPERATOR:
            with suppress(StorageError):  # check_keys tells of it
                found.setdefault(tokens.check(folder / TOKEN), str(folder / TOKEN))
    return found


def check_tokens() -> Iterator[Finding]:
    """Check the variables of this process that name tokens, and the live page's; no value is said."""
    from fedcross.engines.executor import operators

    if os.environ.get(operators.VARIABLE):
        from fedcross.deploy import start

        try:
            start.check_operator()
            yield ok(f"{operators.VARIABLE} names a file with a token")
        except StorageError as error:
            yield fault(str(error))
    if any(name.startswith("FEDCROSS_PAGE") and value for name, value in os.environ.items()):
        from fedcross.server import page_variables

        try:
            page_variables.check()
            yield ok("a live page can be served with the variables FEDCROSS_PAGE*")
        except ConfigError as error:
            yield fault(str(error))


def check_different(folders: Sequence[Path]) -> Iterator[Finding]:
    """Check that no two of the operator's, the page's and the gateway's tokens at hand are one text, which is not said.

    At hand are those that this process's variables name, and those in `folders`.
    """
    from fedcross.engines.executor import operators

    found: dict[str, dict[str, str]] = {}  # token -> whose -> where
    for owner, token, where in _at_hand(folders):
        found.setdefault(token, {}).setdefault(owner, where)
    for owners in (one for one in found.values() if len(one) > 1):
        names = [name for name in owners.values() if name.startswith("FEDCROSS_")]
        files = [name for name in owners.values() if name not in names]
        cures = [f"Give {' and '.join(names)} another token"] if names else []
        if files:
            cures.append(
                f"Remove {' and '.join(files)}: fedcross deploy federation makes a new one, and says what to restart"
            )
        yield fault(
            f"{' and '.join(owners.values())}: one text is {' and '.join(operators.OWNERS[one] for one in owners)}, so "
            f"who knows the one has the other's rights (the page's stands in page.url). {'. '.join(cures)}."
        )


def _at_hand(folders: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Yield whose it is, the token, and its variable or file, of each good token of this process and in `folders`."""
    from fedcross.deploy import tokens
    from fedcross.engines.executor import operators
    from fedcross.server import page_variables

    for folder in folders:
        for name in (tokens.GATEWAY, operators.TOKEN):
            if owner := operators.whose(file := folder / name):
                with suppress(StorageError):  # missing, or check_keys tells of it
                    yield owner, tokens.check(file, operators.PAGE_SHORTEST), str(file)
    for variable, owner in operators.FOLDERS.items():
        with suppress(ValueError):  # check_tokens tells of it
            if token := operators.token(os.environ, variable, operators.PAGE_SHORTEST):
                yield owner, token, variable
    if token := os.environ.get(page_variables.TOKEN, ""):
        yield operators.FOLDERS[operators.PAGE], token, page_variables.TOKEN


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
        start.check_unlocked(path)
        told = recorded.read(record)
        known = _keys(path)
    except (StorageError, ValueError) as error:
        yield fault(str(error))
        return
    except sqlite3.Error as error:
        yield fault(
            f"{path}: cannot be read as a SuperLink's database ({error}). Run as its owner, and name the file that the "
            "SuperLink gets with --database."
        )
        return
    if known is None and not told:
        yield fault(
            f"{path}: no database of a SuperLink, it has no table of devices. Name the file that the SuperLink gets "
            "with --database; if it is that, start the SuperLink, which makes the table."
        )
        return
    known = known or {}
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
        recorded_all = f", all in {record.name}" if revoked else ""
        yield ok(f"{path}: registered keys {len(known) - len(revoked)}; revoked {len(revoked)}{recorded_all}")


def _names(keys: Iterable[bytes]) -> str:
    from fedcross.core.trust.admission import fingerprint

    return ", ".join(sorted(map(fingerprint, keys))[:10])


def _keys(path: Path) -> dict[bytes, str] | None:
    """Return the keys that the database knows and what it says of each; None if it has no table of them.

    Raises
    ------
    sqlite3.Error
        If it cannot be read, or its table is another program's.
    """
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'node'").fetchone():
            return None
        rows = list(database.execute("SELECT public_key, status FROM node WHERE public_key IS NOT NULL"))
        if not all(isinstance(key, bytes) for key, _ in rows):
            raise sqlite3.DataError("keys in its table node are none")
        return {key: str(status) for key, status in rows}
