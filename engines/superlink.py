"""Starts a complete federation on this machine for one run: a SuperLink with TLS and authenticated SuperNodes.

It uses the same programs, certificates and keys as a deployment; only the network is the loopback interface.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import counted
from fedcross.core.events import relay as relay_line
from fedcross.core.private_files import write_private
from fedcross.core.settings import Settings
from fedcross.core.trust.keys import KeyPair, make_node_key
from fedcross.core.trust.signing import make_authority, make_server
from fedcross.engines import bundle, flower, guarded
from fedcross.engines.executor import operators, program
from fedcross.engines.job import Capabilities
from fedcross.engines.local import cores
from fedcross.engines.processes import Family, terminated_by_signal

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

    from fedcross.engines.job import Job

CAPABILITIES = Capabilities()
#: Flower's name of a state that is in memory.
IN_MEMORY = ":flwr-in-memory:"
#: More SuperNodes for each core get a warning.
MOST_PER_CORE = 4


class Params(Settings):
    """No settings; ``partition.clients`` is the number of SuperNodes."""

    name: str = "superlink"

    def node_remarks(self, clients: int) -> list[str]:
        """Return a warning if `clients` SuperNodes are too many for this machine's cores."""
        if clients <= MOST_PER_CORE * cores():
            return []
        return [
            f"engine=superlink: {clients} SuperNodes, one for each client, on {counted(cores(), 'core')}. Each is two "
            "processes, and their start alone can take minutes. For a trial: partition.clients=3 clients_per_round=3."
        ]


def run(job: Job) -> None:
    """Run `job` on a SuperLink with one SuperNode per client."""
    launch(job.app_folder, job.overrides, job.clients, job.output / "engine")


def launch(
    root: Path | None,
    overrides: str,
    clients: int,
    work: Path,
    *,
    app: Path | None = None,
    extra_environment: Mapping[str, str] | None = None,
    sink: flower.LogSink = relay_line,
    relay: Callable[[int], int] | None = None,
) -> None:
    """Start a federation of `clients` SuperNodes, run one Flower app on it until it ends, and end all processes.

    Parameters
    ----------
    root : Path or None
        Folder that holds the packages of fedcross; None: the one from which this process imported them.
    overrides : str
        The run's configuration, as it travels in Flower's run config.
    clients : int
        Number of SuperNodes; number i gets ``partition-id=i num-partitions=clients``.
    work : Path
        Folder for the logs (kept) and, while the run lasts, for keys, database and app bundles (removed).
    app : Path, optional
        Folder of another Flower app to run instead of fedcross.
    extra_environment : mapping, optional
        Environment variables of all processes, besides those of this one.
    sink : callable
        Receives the log of the ServerApp line by line.
    relay : callable, optional
        Gets the SuperLink's port and returns the port to which SuperNodes connect (for example, of a traffic meter).

    Raises
    ------
    FederationError
        If a program does not start or the run does not complete; the message ends with the log that shows why.
    """
    for name in flower.PROGRAMS:  # a SuperLink that lacks one which it starts itself ends with a traceback
        flower.executable(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminated_by_signal())
        state = stack.enter_context(flower.scratch(work))
        home = state / "flwr"
        authority = make_authority(state / "ca")
        server = make_server(authority, state / "server", [flower.LOOPBACK])
        secret = state / "superexec.key"
        write_private(secret, secrets.token_bytes(32))
        operator = {operators.VARIABLE: str(state / "operator.token")}
        write_private(state / "operator.token", secrets.token_urlsafe(32).encode())
        nodes = [make_node_key(state / "nodes", f"client-{i}") for i in range(clients)]
        port, *node_ports = flower.free_ports(1 + clients)
        flower.write_connection(home, port, authority.public)
        app = app or bundle.make(state / "app", root)
        config = flower.write_run_config(state / "run.toml", overrides)

        family = stack.enter_context(
            Family(work, flower.environment(home, {**(extra_environment or {}), **operator}), [state])
        )
        family.start("superlink", superlink_command(port, server, authority.public, secret))
        flower.wait_for_superlink(family, port)
        family.start(flower.SUPEREXEC, superexec_command(port, authority.public, secret))
        fleet_port = port if relay is None else relay(port)
        with contextlib.closing(flower.control_client(port, authority.public, variables=operator)) as client:
            for i, node in enumerate(nodes):
                register(client, node)
                command = supernode_command(fleet_port, node_ports[i], authority.public, node, i, clients, secret)
                family.start(f"supernode-{i}", command)
            flower.check_alive(family)
            flower.submit(family, app, config, client, sink)


def superlink_command(port: int, server: KeyPair, authority: Path, secret: Path) -> list[str]:
    """Return the command that starts the SuperLink; who has the `secret` may take the ServerApp's task.

    Its state is in memory: it serves one run and ends with it, so nobody would read a file again. Models that are on
    their way lie there until they are fetched, each once however many devices get it.
    """
    return [
        *guarded.command("flower-superlink"),
        *("--host", flower.LOOPBACK, "--port", str(port)),
        *("--ssl-certfile", str(server.public), "--ssl-keyfile", str(server.private)),
        *("--ssl-ca-certfile", str(authority), "--enable-supernode-auth", "--isolation", "process"),
        *("--superexec-auth-secret-file", str(secret)),
        *("--database", IN_MEMORY, "--disable-runtime-dependency-installation"),
    ]


def superexec_command(port: int, authority: Path, secret: Path) -> list[str]:
    """Return the command that starts the SuperExec, which prepares one process: there will be one run."""
    return [
        *("env", f"{guarded.READY}=once", *guarded.command("flower-superexec")),
        *("--runtime-api-address", f"{flower.LOOPBACK}:{port}", "--root-certificates", str(authority)),
        *("--superexec-auth-secret-file", str(secret)),
    ]


def supernode_command(
    superlink_port: int, own_port: int, authority: Path, key: KeyPair, partition: int, partitions: int, secret: Path
) -> list[str]:
    """Return the command that starts the SuperNode of one partition, with the executor that does its work."""
    return [
        *(*program.command("supervisor"), "--port", str(own_port), "--secret", str(secret), "--"),
        flower.executable("flower-supernode"),
        *("--superlink", f"{flower.LOOPBACK}:{superlink_port}", "--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(key.private)),
        *("--host", flower.LOOPBACK, "--port", str(own_port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        *("--node-config", f"partition-id={partition} num-partitions={partitions}"),
    ]


def register(client: ControlHttpClient, node: KeyPair) -> int:
    """Register a SuperNode's public key at the SuperLink and return the node's id.

    Does the same as ``flwr supernode register`` without its two seconds of start-up per node.
    """
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.proto.control_pb2 import RegisterNodeRequest

    key = try_load_public_key(node.public)
    return int(client.RegisterNode(RegisterNodeRequest(public_key=key)).node_id)
