"""Flower's commands, environment and Control API, for the engines that start Flower's programs."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import FederationError, StorageError
from fedcross.core.files import open_own, own_folder
from fedcross.engines import operator_token
from fedcross.engines.processes import Family
from fedcross.engines.runs import LogSink as LogSink

if TYPE_CHECKING:
    from fedcross.engines.flower_private import ControlHttpClient

LOOPBACK = "127.0.0.1"
#: What a federation on this machine starts.
PROGRAMS = ("flower-superexec", "flower-supernode", "flwr-serverapp", "flwr")
#: Flower's settings in the environment of all its processes.
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
#: Environment variables that hold folders, or a file; Flower's processes get them as absolute paths.
FOLDERS = ("FEDCROSS_PATH", "FEDCROSS_DATA", operator_token.VARIABLE)

# A time limit that only a hanging program should reach: on a loaded machine, a start took up to two minutes. A process
# that ends is noticed at once.
_START_SECONDS = 300.0
_POLL_SECONDS = 0.1


def executable(name: str) -> str:
    """Return the path of one of Flower's commands; look beside this Python first, then on PATH.

    Raises
    ------
    FederationError
        If the command is not found.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.is_file() else shutil.which(name)
    if path is None:
        raise FederationError(f"{name}: not found beside {sys.executable} nor on PATH. Install flwr[simulation].")
    return path


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of Flower's processes: this one's and `extra`, with :func:`switched` settings.

    `home` is Flower's folder (``FLWR_HOME``): connections and unpacked app bundles. Flower does not specify the working
    folder of its processes, so the folders of plugins and data become absolute paths.
    """
    result = switched({**os.environ, "FLWR_HOME": str(home), **(extra or {})})
    return {**result, **absolute_folders(result)}


def switched(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with Flower's telemetry, update check and installations off, this Python first on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    return {**variables, **SWITCHES, "PATH": path}


def absolute_folders(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of `variables` that name folders, with absolute paths."""
    result = {}
    for variable in FOLDERS:
        if folders := variables.get(variable):
            absolute = (str(Path(folder).expanduser().resolve()) for folder in folders.split(os.pathsep) if folder)
            result[variable] = os.pathsep.join(absolute)
    return result


@contextmanager
def scratch(work: Path) -> Iterator[Path]:
    """Make `work` and, inside it, a temporary folder for its owner only; remove that folder at the end of the block."""
    try:
        own_folder(work)
        folder = tempfile.TemporaryDirectory(prefix="federation-", dir=work, ignore_cleanup_errors=True)
    except OSError as error:
        raise StorageError(f"{work}: cannot be written ({error.strerror}). Choose another output folder.") from error
    with folder as name:
        yield Path(name).resolve()


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports that are free on the loopback interface now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def control_client(
    port: int,
    root_certificate: Path | None = None,
    host: str = LOOPBACK,
    variables: Mapping[str, str] | None = None,
) -> ControlHttpClient:
    """Return a client of the Control API of the SuperLink at `host` and `port`.

    `variables` (default: this process's environment) may name the operator's token; StorageError if its file has none.
    """
    from fedcross.engines.flower_private import ControlHttpClient

    token = operator_token.read(variables)
    return ControlHttpClient.from_server_address(
        server_address=f"{host}:{port}",
        insecure=root_certificate is None,
        root_certificates=root_certificate.read_bytes() if root_certificate else None,
        interceptors=[operator_token.Brings(token)] if token else [],
    )


def wait_for_superlink(family: Family, port: int) -> None:
    """Wait until the SuperLink listens on `port`; raise FederationError if it ends or takes longer."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        check_alive(family)
        try:
            socket.create_connection((LOOPBACK, port), timeout=1.0).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
        else:
            return
    raise family.failure("superlink", f"SuperLink did not listen on {LOOPBACK}:{port} within {_START_SECONDS:.0f} s.")


def check_alive(family: Family) -> None:
    """Raise FederationError if a process of the family has ended."""
    for name in family.ended():
        raise family.failure(name, f"{name} ended before the run began.")


@contextmanager
def run_log(path: Path, sink: LogSink) -> Iterator[LogSink]:
    """Yield a sink that writes each line to the file `path` and passes it on to `sink`."""
    with open_own(path, "a") as log:

        def both(line: str) -> None:
            log.write(f"{line}\n")
            log.flush()
            sink(line)

        yield both
