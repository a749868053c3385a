"""Starts the long-running programs of a deployment: checks their files and ports, then becomes the program.

Flower's telemetry, update check and installation of dependencies are off in all of them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from fedcross.core.errors import ConfigError, StorageError
from fedcross.deploy.control import read_public_key
from fedcross.deploy.keys import OPERATOR, SECRET, check_present, expires_soon
from fedcross.engines import operator_token, ports, protected_superlink, warm_device
from fedcross.engines.flower import executable, switched
from fedcross.engines.remote import host_and_port

#: Share of a container's memory that the ServerApp may take: it fails alone, and the SuperExec starts the next run.
SERVERAPP_SHARE = 0.75
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def superlink(keys: Path, database: Path, listen: str) -> list[str]:
    """Return the SuperLink's command: TLS, registered SuperNodes only, apps in other processes, state on disk.

    Parameters
    ----------
    keys : Path
        The server's folder of :func:`deploy.keys.init`.
    database : Path
        SQLite file.
    listen : str
        ``host:port``. Devices must not reach it but through the gateway.
    """
    certificate, key, authority = keys / "server.crt", keys / "server.key", keys / "ca.crt"
    check_present(certificate, key, authority, keys / SECRET)
    warn(expires_soon(certificate))
    if not database.parent.is_dir():
        raise StorageError(f"--database {database}: {database.parent} is no folder. Make it, or name another.")
    host, port = host_and_port(listen)
    ports.check(host, port, "--listen")
    os.environ.setdefault(operator_token.VARIABLE, str((keys / OPERATOR).resolve()))
    return [
        *protected_superlink.command(),
        *("--host", host, "--port", str(port), "--isolation", "process", "--enable-supernode-auth"),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(authority)),
        *("--superexec-auth-secret-file", str(keys / SECRET)),
        *("--database", str(database), "--disable-runtime-dependency-installation"),
    ]


def superexec(keys: Path, address: str, health: str) -> list[str]:
    """Return the command of the SuperExec, which starts the ServerApp of each run."""
    check_present(keys / "ca.crt", keys / SECRET)
    os.environ.setdefault(operator_token.VARIABLE, str((keys / OPERATOR).resolve()))
    limit_memory()
    return [
        executable("flower-superexec"),
        *("--runtime-api-address", address, "--root-certificates", str(keys / "ca.crt")),
        *("--superexec-auth-secret-file", str(keys / SECRET), "--health-server-address", health),
    ]


def gateway(keys: Path, address: str, listen: str, page: str, page_listen: str) -> list[str]:
    """Return HAProxy's command; its configuration reads the addresses from the environment.

    Parameters
    ----------
    keys : Path
        The server's folder of :func:`deploy.keys.init`.
    address, page : str
        ``host:port`` of the SuperLink and of the live page of runs.
    listen, page_listen : str
        ``host:port`` where devices, and readers of the page, come in.
    """
    check_present(keys / "server.crt", keys / "server.key", keys / "ca.crt")
    warn(expires_soon(keys / "server.crt"))
    for where in (listen, page_listen):
        ports.check(*host_and_port(where), "--listen")
    places = {"LISTEN": listen, "PAGE_LISTEN": page_listen, "SUPERLINK": address, "RUN_PAGE": page}
    os.environ.update({f"FEDCROSS_{name}": place for name, place in places.items()})
    os.environ["FEDCROSS_SERVER_KEYS"] = str(keys.resolve())
    found = shutil.which("haproxy", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
    if found is None:
        raise StorageError("haproxy: not found. Install version 2.4 or newer (Debian: apt-get install haproxy).")
    return [found, "-W", "-db", "-f", str(files("fedcross.deploy") / "gateway.cfg")]


def device(keys: Path, address: str, partitions: int | None, port: int, width: float | None) -> list[str]:
    """Return the command of a device: its SuperNode, and the process that answers its messages.

    Parameters
    ----------
    keys : Path
        The device's folder of :func:`deploy.keys.add_device_keys`.
    address : str
        ``host:port`` of the gateway.
    partitions : int, optional
        How many devices there are, for Flower apps that ask; default: up to this one.
    port : int
        Loopback port between the two processes.
    width : float, optional
        Share of a model's channels that the device can train; None: all.
    """
    found = sorted(keys.glob("*-node.key"))
    if len(found) != 1:
        raise StorageError(f"{keys}: {len(found)} files *-node.key. Name the folder keys of the device's bundle.")
    check_present(found[0], keys / "ca.crt", keys / SECRET)
    warn(expires_soon(keys / "ca.crt"))
    _, partition = read_public_key(found[0].with_suffix(".pub"))
    if partition is None:
        raise StorageError(f"{found[0].with_suffix('.pub')}: names no partition. Make it: fedcross deploy add-device.")
    if width is not None and not 0 < width <= 1:
        raise ConfigError(f"--width {width:g}: give a number above 0, up to 1.")
    data = Path(os.environ.get("FEDCROSS_DATA", "data"))
    if not data.is_dir():
        raise StorageError(f"FEDCROSS_DATA={data}: no such folder. Put this device's examples there, or name another.")
    host_and_port(address)
    ports.check("127.0.0.1", port, "--port")
    count = max(partitions or 0, partition + 1)
    told = "" if width is None else f" device.width={width:g}"
    return [
        *warm_device.command(port),
        *("--superlink", address, "--root-certificates", str(keys / "ca.crt")),
        *("--auth-supernode-private-key", str(found[0])),
        *("--node-config", f"partition-id={partition} num-partitions={count}{told}"),
    ]


def warn(text: str) -> None:
    """Print `text`, if there is any, to stderr."""
    if text:
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


def limit_memory(limit: Path = CGROUP_LIMIT) -> None:
    """Limit this process, and each that it starts, to :data:`SERVERAPP_SHARE` of the container's memory."""
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        most = int(int(limit.read_text()) * SERVERAPP_SHARE)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def replace_process(command: list[str]) -> NoReturn:
    """Become `command`; its files are private to this user."""
    os.umask(0o077)
    settings = switched(os.environ)
    found = shutil.which(command[0], path=settings["PATH"])
    if found is None:
        raise StorageError(f"{command[0]}: not found beside {sys.executable} nor on PATH. Install fedcross again.")
    os.execve(found, command, settings)  # noqa: S606 - a list of our own, no shell
