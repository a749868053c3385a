"""``fedcross doctor``: checks whether a machine or a deployment can run fedcross, and says what to repair.

::

    fedcross doctor                                                  # this machine
    fedcross doctor --keys keys/server --listen 8443 --database state/superlink.db     # a server
    fedcross doctor --keys keys --superlink fl.example.org:8443 --data data            # a device

The exit code is 0 if all is well, 1 after a line that begins with FAULT, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException, HTTPSConnection
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from fedcross.core.errors import StorageError, closed_to_user
from fedcross.core.paths import PLUGIN_VARIABLE, named_folders, page
from fedcross.deploy.keys import SECRET, check_present, expires_soon, time_left
from fedcross.engines import ports
from fedcross.engines.certificates import read_certificate, read_key

GIB = 2**30
#: The checkpoints of a large pool need this much.
LEAST_DISK = 2 * GIB
CONNECT_S = 5.0
#: Seconds by which a device's clock may be behind and ahead of the server's: Flower refuses older and newer calls.
BEHIND_S, AHEAD_S = 299.0, 10.0
#: The first call of a SuperNode; without a key the gateway and the SuperLink answer 401.
FIRST_CALL, UNKNOWN_CALLER = "/v1/fleet/activate-node", 401
#: What the image leaves out: devices run no simulation.
NOT_IN_IMAGE = ("ray",)


class Finding(NamedTuple):
    """One line of the report: its kind, ``ok``, ``note`` or ``FAULT``, and the text with what to do."""

    kind: str
    text: str


ok, note, fault = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "FAULT")


def judged(good: bool, text: str, cure: str) -> Finding:
    """Return `text` as ok, or as a fault with its cure."""
    return ok(text) if good else fault(f"{text}. {cure}")


def check_versions(distribution: str = "fedcross") -> Iterator[Finding]:
    """Compare the installed versions with what the installed package requires."""
    yield ok(f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    for needed in map(Requirement, metadata.requires(distribution) or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            try:
                found = metadata.version(needed.name)
                good = needed.specifier.contains(found, prereleases=True)
                yield judged(good, f"{needed.name} {found}", f"pip install '{needed}'")
            except metadata.PackageNotFoundError:
                if needed.name not in NOT_IN_IMAGE:
                    yield fault(f"{needed.name} is missing. Install it: pip install '{needed}'")


def check_environment() -> Iterator[Finding]:
    """Check the user, the environment variables that control Flower, and the folders of own methods and models."""
    if os.geteuid() == 0:
        yield note("running as root. A deployment must not: anyone who can submit a run acts as this user.")
    for name, wanted in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1")):
        if os.environ.get(name) != wanted:
            yield note(f"{name} is not {wanted}: Flower sends data to its makers. export {name}={wanted}")
    for folder in named_folders():
        good = folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
        yield judged(good, f"{PLUGIN_VARIABLE}: {folder}", "This user cannot read such a folder. Mount it.")


def check_disk(folder: Path, least: int = LEAST_DISK) -> Iterator[Finding]:
    """Check that `folder`, or its nearest existing parent, can be written and has enough free space."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        yield fault(f"{folder}: {place} cannot be written ({error.strerror}). Free space, or choose another folder.")
        return
    free = shutil.disk_usage(place).free
    yield judged(free >= least, f"{folder}: {free / GIB:.1f} GiB free", f"{least / GIB:.1f} GiB are needed.")


def check_data(folder: Path, named: bool) -> Iterator[Finding]:
    """Check that the data folder exists, is readable and not empty; only one that the user `named` must."""
    if found := sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []:
        yield ok(f"{folder}: {', '.join(found[:8])}{' ...' if len(found) > 8 else ''}")
    else:
        text = f"{folder}: no data here. Only task=digits runs without; see {page('data.md')}."
        yield (fault if named else note)(text)


def check_gpu(required: bool) -> Iterator[Finding]:
    """Show the GPUs that torch can use; without one it is a fault if one is required."""
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield ok(f"GPU {index}: {torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if not torch.cuda.is_available():
        text = "torch finds no GPU: training runs on the CPU. If there is one, install the torch build for its driver."
        yield (fault if required else note)(text)


def check_keys(folder: Path) -> Iterator[Finding]:
    """Check the folder of a server or of a device: certificates are valid, keys are there and private."""
    check_present(folder / "ca.crt", folder / SECRET)
    for path in (one for one in (folder / "ca.crt", folder / "server.crt") if one.exists()):
        said = expires_soon(path)
        yield fault(said) if said else ok(f"{path}: valid for {time_left(path).days} days")
    pairs = sorted(folder.glob("*-node.key")) + ([folder / "server.key"] if (folder / "server.crt").exists() else [])
    if not pairs:
        yield fault(f"{folder}: no server.key and no NAME-node.key. fedcross deploy init or add-device makes one.")
    for path in pairs:
        public = read_key(path).public_key()
        if path.name == "server.key" and read_certificate(path.with_suffix(".crt")).public_key() != public:
            yield fault(f"{path}: not the key of server.crt. fedcross deploy renew makes both.")
        else:
            private = not path.stat().st_mode & 0o077
            yield judged(private, f"{path}: a key", f"Others on this machine can read it: chmod 600 {path}")


def check_listen(port: int) -> Iterator[Finding]:
    """Check that a server can listen on `port`."""
    yield fault(said) if (said := ports.fault("0.0.0.0", port)) else ok(f"port {port} is free")  # noqa: S104


def check_database(path: Path) -> Iterator[Finding]:
    """Check that the SuperLink's database is one and can be written."""
    try:
        with closing(sqlite3.connect(path, timeout=CONNECT_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
        yield ok(f"{path}: can be written")
    except sqlite3.Error as error:
        yield fault(f"{path}: {error}. Stop what locks it, or restore it from a backup.")


def check_server(address: str, authority: Path) -> Iterator[Finding]:
    """Check from a device that the gateway answers with a certificate of `authority`, and compare the clocks."""
    host, _, port = address.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=str(authority))
        with closing(HTTPSConnection(host.strip("[]"), int(port), timeout=CONNECT_S, context=trust)) as link:
            link.request("POST", FIRST_CALL, body=b"", headers={"Content-Type": "application/protobuf"})
            reply = link.getresponse()
    except (OSError, HTTPException, ValueError) as error:
        what, cure = "no answer", "Is the server up, the name right, the firewall open?"
        if isinstance(error, ssl.SSLCertVerificationError):
            what, cure = "its certificate is refused", f"Is {authority} this federation's?"
        yield fault(f"{address}: {what} ({error}). {cure}")
        return
    cure = "Is the SuperLink up, and this the gateway's address?"
    yield judged(reply.status == UNKNOWN_CALLER, f"{address} answers {reply.status}", cure)
    if (date := reply.getheader("date")) is not None and reply.status == UNKNOWN_CALLER:
        late = parsedate_to_datetime(date).timestamp() - time.time()
        text = f"this device's clock is {abs(late):.0f} s {'behind' if late > 0 else 'ahead of'} the server's"
        cure = "Set it, and turn on its synchronisation (timedatectl set-ntp true)"
        yield judged(-AHEAD_S <= late <= BEHIND_S, text, cure)


def examine(asked: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of all checks; a file that this user may not read is a fault, and the rest goes on."""
    data = asked.data or Path(os.environ.get("FEDCROSS_DATA") or "data")
    checks = [check_versions(), check_environment(), check_disk(asked.output)]
    checks += [check_data(data, asked.data is not None or "FEDCROSS_DATA" in os.environ), check_gpu(asked.gpu)]
    checks += [*map(check_keys, asked.keys), *map(check_listen, asked.listen)]
    checks += [check_database(asked.database)] if asked.database else []
    checks += [check_server(asked.superlink, folder / "ca.crt") for folder in asked.keys if asked.superlink]
    for check in checks:
        try:
            yield from check
        except (PermissionError, StorageError) as error:
            yield fault(closed_to_user(error) if isinstance(error, PermissionError) else str(error))


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return 1 if one of them is a fault."""
    parser = argparse.ArgumentParser(prog="fedcross doctor", description="Check a machine or a deployment.")
    parser.add_argument("--data", type=Path, help="data folder that must exist (default: FEDCROSS_DATA, else ./data)")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="where runs write")
    parser.add_argument("--gpu", action="store_true", help="require a GPU")
    parser.add_argument("--keys", type=Path, nargs="*", default=[], metavar="FOLDER", help="of a server or device")
    parser.add_argument("--superlink", metavar="HOST:PORT", help="with --keys: the gateway, as a device reaches it")
    parser.add_argument("--listen", type=int, nargs="*", default=[], metavar="PORT", help="ports that must be free")
    parser.add_argument("--database", type=Path, metavar="FILE", help="the SuperLink's")
    faults = 0
    for finding in examine(parser.parse_args(arguments)):
        print(f"{finding.kind:<5}  {finding.text}", flush=True)
        faults += finding.kind == "FAULT"
    print(f"{faults} faults" if faults != 1 else "1 fault")
    return 1 if faults else 0
