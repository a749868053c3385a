"""Checks of ``fedcross doctor --device``, made on the device itself: its key, its server, its clock, its own code."""

from __future__ import annotations

import os
import ssl
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from time import time
from typing import Any

from fedcross.core.errors import StorageError, quoted
from fedcross.core.plugins import PLUGIN_VARIABLE, named_folders
from fedcross.core.trust.keys import SECRET, bundle_of, lost_key
from fedcross.server.commands.findings import Finding, fault, note, ok
from fedcross.server.commands.key_checks import SOON

CONNECT_S = 5.0
#: What a SuperNode calls first. Without its signature the SuperLink refuses the call, and tells the time in its reply.
DOOR = "/v1/fleet/activate-node"
MEDIA = "application/protobuf"
#: Most bytes of a refusal that are read.
LONGEST = 1000
REFUSED = 401
#: How it refuses a call that is signed, but asks for what Flower does not allow: with a registered key, and without.
KNOWN, UNKNOWN = 400, 412
#: What the gateway answers while the SuperLink does not: an error of it, none to be had, too late. With the header
#: Retry-After it says that the address has its share of calls.
AWAY = (502, 503, 504)
HANGS = "At the server: is the SuperLink up, and its machine not overloaded?"
AGAIN = "Ask again; at the server, look into the gateway's log."
#: How a finding about the clock begins.
CLOCK = "clock:"
#: Seconds that a device's clock may be behind or ahead: Flower 1.41 refuses signed requests beyond.
BEHIND_S, AHEAD_S = 300, 5


def check_node_key(folder: Path) -> Iterator[Finding]:
    """Check a device's keys: the authority's certificate, and that key and secret are good and only the owner's."""
    from fedcross.core.exposed import check_owner
    from fedcross.core.private_files import check_folder
    from fedcross.core.trust.certificates import check_key, read_authority, validity
    from fedcross.core.trust.lasting import AUTHORITY_SOON

    try:
        names = sorted(folder.iterdir())
    except PermissionError:
        whose = "Run as the owner of the keys (a device in a container: DEVICE_USER in its .env)."
        yield fault(f"{folder}: user {os.getuid()} may not look there. {whose}")
        return
    except OSError:
        bundle = quoted(bundle_of(folder)) if folder.name == "keys" else "BUNDLE"
        yield fault(
            f"{folder}: no such folder. Name the folder 'keys' of the device's bundle. If that is lost: fedcross "
            f"deploy rotate-key {bundle} makes it again."
        )
        return
    keys = [path for path in names if path.name.endswith("-node.key")]
    if len(keys) > 1:
        yield fault(f"{folder}: {len(keys)} files *-node.key, a device has one. {_which(folder, keys)}")
    if not keys:
        yield from _no_key(folder, [path for path in names if path.name.endswith("-node.pub")])
    secret = folder / SECRET
    if not secret.is_file() and not secret.is_dir():  # of a folder check_key tells
        yield fault(
            f"{secret}: missing. fedcross deploy rotate-key --secret BUNDLE makes a new one, and the key stays (in a "
            "federation's own folder: fedcross deploy federation)."
        )
    for check, path in ((check_folder, folder), *((check_key, key) for key in sorted(folder.glob("*.key")))):
        try:
            check(path)
            yield ok(f"{check_owner(path) if path != folder else path}: private")
        except StorageError as error:
            yield fault(str(error))
    try:
        read_authority(folder / "ca.crt")
        left = validity(folder / "ca.crt")
        text = f"{folder / 'ca.crt'}: {left.days} days left"
        new = "Copy the new ca.crt from the server, once it has one."
        yield ok(text) if left >= AUTHORITY_SOON else (note if left >= SOON else fault)(f"{text}. {new}")
    except StorageError as error:
        yield fault(str(error))


def _which(folder: Path, keys: Sequence[Path]) -> str:
    """Return what to do about several keys of devices in `folder`: the bundle around it tells which is its own."""
    from fedcross.deploy.bundle import started_as

    own = f"{started_as(bundle_of(folder.absolute()))}-node.key"
    if own in [key.name for key in keys]:
        others = " ".join(quoted(key) for key in keys if key.name != own)
        return f"The bundle starts it with {own}. Move the others away: {others}"
    return "Keep the one that the option --name of its command or unit names, and move the others away."


def _no_key(folder: Path, public: Sequence[Path]) -> Iterator[Finding]:
    """Tell what to do about a device that has no private key, with its public one or without."""
    from fedcross.deploy.bundle import started_as

    place = bundle_of(folder)
    if public:
        for path in public:
            here = path.name == f"{place.resolve().name}-node.pub"  # not where a container mounts the bundle's keys
            yield fault(
                lost_key(path)
                if here
                else f"{path}: its private key is away. Bring it back. If it is lost: fedcross deploy rotate-key "
                "BUNDLE makes a new one and keeps this file, whose key must be revoked."
            )
    elif folder.resolve().name == "keys":
        cure = f"fedcross deploy rotate-key {quoted(place)} makes a new pair."
        if started_as(place) is None and not (folder / "ca.crt").exists():  # new-client makes the key before
            cure = f"remove {place} and call fedcross deploy new-client again, which was cut off there."
        yield fault(f"{folder}: no *-node.key, and no *-node.pub. Bring them back. If they are lost: {cure}")
    else:
        yield fault(
            f"{folder}: no *-node.key, and no *-node.pub. Bring them back. If they are lost: fedcross deploy "
            "rotate-key BUNDLE makes a new pair, or for a federation's own device, fedcross deploy federation with "
            "--device."
        )


def check_server(address: str, authority: Path) -> Iterator[Finding]:
    """Check that the gateway at HOST:PORT has a certificate of `authority`, a SuperLink, and the same time."""
    host, _, port = address.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=authority)
    except OSError as error:
        yield fault(
            f"{authority}: cannot be read as a certificate ({error}). Copy the federation's ca.crt there again."
        )
        return
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=CONNECT_S, context=trust)
    stands = False
    try:
        connection.connect()
        stands = True
        connection.request("POST", DOOR, body=b"", headers={"Content-Type": MEDIA})
        reply = connection.getresponse()
        status, date, retry = reply.status, reply.headers.get("date"), reply.headers.get("retry-after")
    except ssl.SSLCertVerificationError as error:
        yield fault(
            f"{address}: its certificate is refused ({error.verify_message}). Is {authority} of this federation, the "
            "name in its certificate, this device's clock right?"
        )
        return
    except (OSError, HTTPException) as error:
        if stands and isinstance(error, TimeoutError):
            yield fault(
                f"{address}: no answer within {CONNECT_S:.0f} s, with a certificate of this federation. {HANGS}"
            )
        elif stands:
            yield fault(
                f"{address}: the connection broke off ({error!r}), after a certificate of this federation. {AGAIN}"
            )
        else:
            yield fault(f"{address}: no connection ({error}). Is the server up, the name right, the firewall open?")
        return
    finally:
        connection.close()
    if status == REFUSED:
        yield ok(f"{address} answers, with a certificate of this federation")
    elif status in AWAY and retry:
        yield note(
            f"{address}: the gateway has no more room for calls of this address now ({status}). Ask again later."
        )
    elif status in AWAY:
        yield fault(f"{address}: the gateway is up, but its SuperLink does not answer it ({status}). {HANGS}")
    else:
        yield fault(f"{address}: answers {status} to {DOOR}. Is this the address of the gateway?")
    yield from check_clock(date, time())


def check_registered(address: str, folder: Path) -> Iterator[Finding]:
    """Ask the SuperLink at HOST:PORT whether it knows the device's key; nothing changes there.

    A node that would join with a pause between heartbeats that Flower does not allow is told so, if its key is
    registered, and else that it cannot join.
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    from fedcross.core.trust.admission import fingerprint
    from fedcross.engines.executor.fleet import NO_GATEWAY, TWO_TOKENS

    try:
        [path] = folder.glob("*-node.key")
        private: Any = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError):
        return  # check_node_key says so
    body, headers = signed_call(private)
    host, _, port = address.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=folder / "ca.crt")
        with closing(HTTPSConnection(host.strip("[]"), int(port), timeout=CONNECT_S, context=trust)) as connection:
            connection.request("POST", DOOR, body=body, headers=headers)
            reply = connection.getresponse()
            status, said = reply.status, reply.read(LONGEST).decode(errors="replace")
    except (OSError, HTTPException):
        return  # check_server says so
    name = f"{path}: key {fingerprint(public_key_to_bytes(private.public_key()))}"
    if status == KNOWN:
        yield ok(f"{name} is registered at the SuperLink")
    elif status == UNKNOWN:
        yield fault(
            f"{name}: no registered node has it. It was revoked, and is then never accepted again (on the device: "
            "fedcross deploy rotate-key), or not registered yet (on the server: fedcross deploy register)."
        )
    elif status == REFUSED and NO_GATEWAY in said:
        yield fault(f"{address}: the SuperLink does not answer this device{TWO_TOKENS}.")
    else:
        yield note(f"{name}: the SuperLink does not say now whether it is registered ({status}).")


def signed_call(private: Any) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a node's first call with this key, as :func:`check_registered` makes it."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    public, when = public_key_to_bytes(private.public_key()), datetime.now(UTC).isoformat()
    headers = {
        "Content-Type": MEDIA,
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        TIMESTAMP_HEADER: when,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, when.encode())).decode(),
    }
    return ActivateNodeRequest(public_key=public, heartbeat_interval=0).SerializeToString(), headers


def check_clock(date: str | None, now: float) -> Iterator[Finding]:
    """Compare this device's clock, `now` in seconds since 1970, with the server's, which has whole seconds."""
    if date is None:
        yield note("the server does not tell the time, so the clock is not compared.")
        return
    try:
        late = parsedate_to_datetime(date).timestamp() + 0.5 - now
    except ValueError:
        yield note(f"the server tells the time as {date[:40]!r}, so the clock is not compared.")
        return
    text = f"{CLOCK} {abs(late):.0f} s {'behind' if late > 0 else 'ahead of'} the server's"
    # One second for the reply's way and its whole seconds.
    if -AHEAD_S - 1 < late < BEHIND_S:
        yield ok(text)
    else:
        yield fault(
            f"{text}; {BEHIND_S} s behind and {AHEAD_S} s ahead are allowed. Set it, and turn on its synchronisation "
            "(timedatectl set-ntp true)."
        )


def check_own_code() -> Iterator[Finding]:
    """Check the folders of own methods and models that the environment names."""
    for folder in named_folders():
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
            yield fault(
                f"{PLUGIN_VARIABLE}: {folder} is no folder that this user can read. Mount it, or change its mode."
            )
        else:
            files = sum(1 for _ in folder.rglob("*.py"))
            yield ok(f"{folder}: own methods and models, {files} files")
