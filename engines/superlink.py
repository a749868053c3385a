"""Starts a federation on this machine for one run: a SuperLink with TLS, a SuperExec, authenticated SuperNodes.

The programs, certificates and keys are those of a deployment; the network is the loopback interface. For a deployment:

- SuperLink: :func:`protected_superlink.command` and Flower's options, ``FEDCROSS_OPERATOR_FILE`` in its environment.
- SuperExec: Flower's own ``flower-superexec``, started again when it ends.
- Device: :func:`warm_device.command`, Flower's SuperNode with a ClientApp process that stays; restarted when it ends.
- A run that lost its ServerApp, SuperLink or SuperExec is submitted again by ``engine=remote`` (:func:`runs.complete`).
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedcross.core.errors import FederationError, counted
from fedcross.core.events import relay
from fedcross.core.files import write_private
from fedcross.core.settings import Settings
from fedcross.engines import bundle, flower, operator_token, protected_superlink, runs, warm_device
from fedcross.engines.certificates import KeyPair, make_authority, make_node_key, make_server
from fedcross.engines.job import Capabilities
from fedcross.engines.local import cores
from fedcross.engines.processes import Family, tail, terminated_by_signal

if TYPE_CHECKING:
    from fedcross.engines.flower_private import ControlHttpClient
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
    sink: flower.LogSink = relay,
) -> None:
    """Start a federation of `clients` SuperNodes, run one Flower app on it until it ends, and end all processes.

    A process that ends is started again, and a run that lost its server continues (:func:`runs.complete`).

    `root` holds the packages of fedcross (None: where this process imported them), `work` gets the logs, `sink` each
    line of the ServerApp's log; `app` is another Flower app. Raises FederationError if the run does not complete.
    """
    for name in flower.PROGRAMS:
        flower.executable(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminated_by_signal())
        state = stack.enter_context(flower.scratch(work))
        write_private(state / "superexec.key", secrets.token_bytes(32))
        write_private(state / "operator.token", secrets.token_urlsafe(32).encode())
        authority = make_authority(state / "ca")
        server = make_server(authority, state / "server", [flower.LOOPBACK])
        keys = Keys(
            state, authority.public, server, [make_node_key(state / "nodes", f"node-{i}") for i in range(clients)]
        )
        environment = flower.environment(state / "flwr", {operator_token.VARIABLE: str(state / "operator.token")})
        fab = bundle.build(app or bundle.make(state / "app", root), state, environment)
        log = stack.enter_context(flower.run_log(work / "run.log", sink))
        for left in reversed(range(runs.MOST_DEATHS + 1)):
            with Family(work, environment, [state]) as family:
                try:
                    federate(family, keys, fab, overrides, log)
                    return
                except SuperLinkEndedError:
                    if not left or runs.folder_of(overrides) is None:
                        raise
            log("fedcross: the SuperLink ended. The federation is started again.")
            overrides = runs.continued(overrides)


class SuperLinkEndedError(FederationError):
    """The SuperLink has ended, and with it all that it knew."""


class Keys(NamedTuple):
    """Keys and secrets of a federation, in `folder`."""

    folder: Path
    authority: Path
    server: KeyPair
    nodes: list[KeyPair]

    @property
    def secret(self) -> Path:
        """The file of the SuperExec's secret."""
        return self.folder / "superexec.key"


def federate(family: Family, keys: Keys, fab: Path, overrides: str, log: flower.LogSink) -> None:
    """Start all processes of a federation and complete a run on it; restart those that end, except the SuperLink."""
    port, *node_ports = flower.free_ports(1 + len(keys.nodes))
    family.start("superlink", superlink_command(port, keys))
    flower.wait_for_superlink(family, port)
    family.start("superexec", superexec_command(port, keys))
    operator = {operator_token.VARIABLE: str(keys.folder / "operator.token")}
    with contextlib.closing(flower.control_client(port, keys.authority, variables=operator)) as client:
        for i, own_port in enumerate(node_ports):
            register(client, keys.nodes[i])
            family.start(f"supernode-{i}", supernode_command(port, own_port, keys, i))
        flower.check_alive(family)

        def check() -> None:
            if "superlink" in family.ended():
                raise SuperLinkEndedError("SuperLink ended in the middle of the run.")
            for name in family.revive():
                log(f"{name} ended; it is started again.")

        try:
            runs.complete(client, fab, overrides, log, check)
        except FederationError as error:
            kind = SuperLinkEndedError if "superlink" in family.ended() else FederationError
            raise kind(f"{error}\nEnd of {family.log('run')}:\n{tail(family.log('run'))}") from error


def superlink_command(port: int, keys: Keys) -> list[str]:
    """Return the command that starts the SuperLink, with its state in memory; it serves one run."""
    return [
        *protected_superlink.command(),
        *("--host", flower.LOOPBACK, "--port", str(port), "--database", IN_MEMORY),
        *("--ssl-certfile", str(keys.server.public), "--ssl-keyfile", str(keys.server.private)),
        *("--ssl-ca-certfile", str(keys.authority), "--enable-supernode-auth", "--isolation", "process"),
        *("--superexec-auth-secret-file", str(keys.secret), "--disable-runtime-dependency-installation"),
    ]


def superexec_command(port: int, keys: Keys) -> list[str]:
    """Return the command that starts the SuperExec, which starts the ServerApp of the run."""
    return [
        *(flower.executable("flower-superexec"), "--runtime-api-address", f"{flower.LOOPBACK}:{port}"),
        *("--root-certificates", str(keys.authority), "--superexec-auth-secret-file", str(keys.secret)),
    ]


def supernode_command(superlink_port: int, own_port: int, keys: Keys, partition: int) -> list[str]:
    """Return the command that starts the SuperNode of one partition, with the process that answers its messages."""
    return [
        *warm_device.command(own_port),
        *("--superlink", f"{flower.LOOPBACK}:{superlink_port}", "--root-certificates", str(keys.authority)),
        *("--auth-supernode-private-key", str(keys.nodes[partition].private)),
        *("--node-config", f"partition-id={partition} num-partitions={len(keys.nodes)}"),
    ]


def register(client: ControlHttpClient, node: KeyPair) -> int:
    """Register a SuperNode's public key at the SuperLink and return the node's id."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    from fedcross.engines.flower_private import control_pb2

    key = load_ssh_public_key(node.public.read_bytes())
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return int(client.RegisterNode(control_pb2.RegisterNodeRequest(public_key=pem)).node_id)
