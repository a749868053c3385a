"""``fedcross doctor``: checks whether this machine or deployment can run fedcross, and says what to repair.

::

    fedcross doctor                                             # this machine: versions, disk, GPU, data
    fedcross doctor --keys keys/server --authority keys/public/ca.crt --listen 8443              # a server
    fedcross doctor --keys keys/server --connect 127.0.0.1:8443 127.0.0.1:8000 --database state/superlink.db    # is up
    fedcross doctor --device keys --superlink fl.example.org:8443 --data data --output state     # on a device

The exit code is 0 if all is well, 1 after a fault (a line that begins with ``FAULT``), 2 for wrong use.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from fedcross.core import ports
from fedcross.core.causes import PAGE, cause_of
from fedcross.core.errors import closed_to_user
from fedcross.core.exposed import taken
from fedcross.core.paths import page
from fedcross.server.commands.device_checks import check_node_key, check_own_code, check_registered, check_server
from fedcross.server.commands.findings import Finding, fault, note, ok
from fedcross.server.commands.key_checks import check_keys, check_one_authority
from fedcross.server.commands.server_checks import check_database, check_different, check_served, check_tokens

GIB = 2**30
#: With less free space, the checkpoints of a large pool do not fit.
LEAST_DISK = 2 * GIB
#: A run with its checkpoints, logs and client states writes some hundred files.
LEAST_FILES = 1000
CONNECT_S = 5.0
#: Devices of which one is there where torch could use a GPU: NVIDIA's, Jetson's, AMD's, WSL's.
GPU_SIGNS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
NO_GPU = "this machine has no GPU: training runs on the CPU."
#: What the image leaves out: devices run no simulation and draw no pictures.
NOT_ON_DEVICES = ("ray", "matplotlib")


def check_versions(distribution: str = "fedcross", unneeded: Collection[str] = ()) -> Iterator[Finding]:
    """Compare the installed versions with what the installed package requires; those `unneeded` may be missing."""
    from packaging.requirements import Requirement

    version = ".".join(map(str, sys.version_info[:3]))
    yield (
        ok(f"Python {version}")
        if sys.version_info >= (3, 11)
        else fault(f"Python {version}: 3.11 or later is needed. Make a new environment with it.")
    )
    try:
        needed = [Requirement(text) for text in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        yield fault(f"{distribution} is not installed in this environment. Install it: pip install .")
        return
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if requirement.name in unneeded:
                continue
            yield fault(f"{requirement.name} is missing. Install it: pip install '{requirement}'")
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield ok(f"{requirement.name} {found}")
        else:
            yield fault(f"{requirement.name} {found}: {requirement.specifier} is needed. pip install '{requirement}'")


def check_environment() -> Iterator[Finding]:
    """Check the user, and the environment variables that control Flower."""
    if os.geteuid() == 0:
        yield note("running as root. A deployment must not: anyone who can submit a run acts as this user.")
    for name, wanted in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1")):
        if os.environ.get(name) != wanted:
            yield note(f"{name} is not {wanted}: Flower sends data to its makers. export {name}={wanted}")


def check_disk(folder: Path, least: int = LEAST_DISK) -> Iterator[Finding]:
    """Check that `folder`, or its nearest existing parent, can be written and has enough free space."""
    place = next(p for p in (folder.resolve(), *folder.resolve().parents) if _exists(p))
    if place.is_dir() and os.statvfs(place).f_flag & os.ST_RDONLY:
        yield fault(
            f"{folder}: {place} is on a disk that nobody can write (Read-only file system). Choose another folder."
        )
        return
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield fault(f"{folder}: {place} cannot be written by this user. Choose another folder or change its owner.")
        return
    space = os.statvfs(place)
    if said := _unwritable(place):
        files = ", no more files (inodes)" if space.f_files and not space.f_favail else ""
        yield fault(f"{folder}: {place} cannot be written ({said}{files}). Free space there, or choose another folder.")
        return
    free = space.f_bavail * space.f_frsize
    text = f"{folder}: {free / GIB:.1f} GiB free"
    if free < least:
        yield fault(f"{text}, {least / GIB:.1f} GiB are needed. Free space.")
    elif space.f_files and space.f_favail < LEAST_FILES:
        yield fault(f"{text}, but only {space.f_favail} more files fit there (inodes). Delete files.")
    else:
        yield ok(text)


def check_output(folder: Path, database: Path | None) -> Iterator[Finding]:
    """Tell of a folder that a run refuses: one of keys, or another program's. At `database` is only room looked for."""
    what = taken(folder.resolve())
    if what and (database is None or database.resolve().parent != folder.resolve()):
        yield fault(f"{folder}: {what}. No run writes there: choose another --output.")


def _unwritable(place: Path) -> str:
    """Return the system's words if a small file cannot be written in `place`; "" if it can. Nothing stays of it."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # below a folder of somebody else
        return False


def check_data(folder: Path, required: bool, named: bool = False) -> Iterator[Finding]:
    """Check that the data folder exists, is readable and not empty.

    A missing one is a note, and a fault if it is `required`, or `named` in ``FEDCROSS_DATA``.
    """
    missing = fault if required else note
    if not folder.is_dir() and named and not required:
        yield fault(f"{folder}: no such folder, but FEDCROSS_DATA names it. Correct or unset the variable.")
    elif not folder.is_dir():
        yield missing(f"{folder}: no such data folder. Only task=digits runs without; see {page('data.md')}.")
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield fault(f"{folder}: cannot be read by this user. Change its mode or owner.")
    elif keys := next((path for name in ("ca.crt", "*/ca.crt") for path in folder.glob(name)), None):
        yield fault(f"{folder}: a folder of keys, with {keys.relative_to(folder)}. Name the folder of the data.")
    elif found := sorted(path.name for path in folder.iterdir()):
        yield ok(f"{folder}: {', '.join(found[:8])}{' ...' if len(found) > 8 else ''}")
    else:
        yield missing(f"{folder}: this data folder is empty. See {page('data.md')}.")


def check_gpu(required: bool) -> Iterator[Finding]:
    """Check that torch can use the GPU, if the machine has one or one is required.

    Without a sign of a GPU torch stays out: to import it takes seconds, on a small device a minute.
    """
    if not required and not shutil.which("nvidia-smi") and not any(map(os.path.exists, GPU_SIGNS)):
        yield note(NO_GPU)
        return
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield ok(f"GPU {index}: {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    elif shutil.which("nvidia-smi"):
        yield fault(
            "this machine has a GPU driver, but torch finds no GPU. Install the torch build for its CUDA version."
        )
    else:
        yield (fault if required else note)(NO_GPU)


def check_listen(port: int, host: str = "0.0.0.0") -> Finding:  # noqa: S104 - the SuperLink's own default
    """Check that a server can listen on `port`."""
    said = ports.fault(host, port)
    return fault(said) if said else ok(f"port {port} is free")


def check_connect(address: str) -> Finding:
    """Check that HOST:PORT accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
            return ok(f"{address} answers")
    except (OSError, OverflowError) as error:
        return fault(f"{address}: no connection ({error}). Is the server up, the name right, the firewall open?")


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of all requested checks; what this user may not look at is a fault, and the rest goes on."""
    for check in _checks(arguments):
        try:
            yield from check
        except PermissionError as error:
            yield fault(closed_to_user(error))


def _checks(arguments: argparse.Namespace) -> Iterator[Iterator[Finding]]:
    yield check_versions(unneeded=NOT_ON_DEVICES if arguments.device else ())
    yield check_environment()
    yield check_tokens()
    yield check_disk(arguments.output)
    yield check_output(arguments.output, arguments.database)
    named = os.environ.get("FEDCROSS_DATA", "")
    yield check_data(arguments.data or Path(named or "data"), arguments.data is not None, named=bool(named))
    yield check_gpu(arguments.gpu)
    yield check_own_code()
    if arguments.device:
        yield check_node_key(arguments.device)
        if arguments.superlink and _exists(arguments.device / "ca.crt"):  # else there is nothing to compare with
            yield check_server(arguments.superlink, arguments.device / "ca.crt")
            yield check_registered(arguments.superlink, arguments.device)
    for folder in arguments.keys:
        yield check_keys(folder, arguments.authority, arguments.keys)
    yield check_one_authority(arguments.keys)
    yield check_different(arguments.keys)
    yield (check_listen(port) for port in arguments.listen)
    if arguments.database:
        yield check_database(arguments.database)
    for address in arguments.connect:
        yield _connected(address, arguments.keys)


def _connected(address: str, keys: Sequence[Path]) -> Iterator[Finding]:
    """Check that something answers there and, with the server's keys at hand, that it uses them."""
    yield (found := check_connect(address))
    if found.kind == "ok":
        yield from check_served(address, keys)


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return 1 if one of them is a fault."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.superlink and not asked.device:
        parser.error("--superlink needs --device FOLDER, whose ca.crt the gateway's certificate must match")
    found = [finding for finding in examine(asked) if _print(finding)]
    wrong = [finding.text for finding in found if finding.kind == "FAULT"]
    known = (cause_of(text, arguments) for text in wrong)
    if names := sorted({cause.name for cause in known if cause is not None}):
        print(f"Causes: {', '.join(names)} ({PAGE})")
    faults = len(wrong)
    print(f"{faults} faults" if faults != 1 else "1 fault")
    return 1 if faults else 0


def _print(finding: Finding) -> bool:
    print(f"{finding.kind:<5}  {finding.text}", flush=True)
    return True


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    if int(port) > 65535:  # the system would ask another port, without a word
        raise argparse.ArgumentTypeError(f"{text!r}: there is no port above 65535")
    if not ports.is_host(host):
        raise argparse.ArgumentTypeError(f"{text!r}: {host!r} can be no host's name")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedcross doctor", description="Check a machine or a deployment and say what to repair."
    )
    parser.add_argument("--data", type=Path, help="data folder that must exist (default: FEDCROSS_DATA, else ./data)")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="where runs write")
    parser.add_argument("--gpu", action="store_true", help="require a GPU")
    parser.add_argument("--keys", type=Path, nargs="*", default=[], metavar="FOLDER", help="keys and certificates")
    parser.add_argument(
        "--authority", type=Path, help="the ca.crt that signed the certificates (default: the folder's own)"
    )
    parser.add_argument("--device", type=Path, metavar="FOLDER", help="on a device: the keys of its bundle")
    parser.add_argument(
        "--superlink", type=_address, metavar="HOST:PORT", help="on a device: the gateway, as the device reaches it"
    )
    parser.add_argument("--listen", type=int, nargs="*", default=[], metavar="PORT", help="ports that must be free")
    parser.add_argument(
        "--connect",
        type=_address,
        nargs="*",
        default=[],
        metavar="HOST:PORT",
        help="must answer; with --keys and a server.crt there, with this certificate and the tokens there that count",
    )
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="the SuperLink's: can it be written, are revoked keys so in it?"
    )
    return parser
