"""A federation over the network, deployed so that every part can be killed, stopped or cut off by itself.

SuperLink with ``--isolation process``, a SuperExec of its own, TLS and authenticated nodes, as in a deployment, and on
demand a database on disk, as there; SuperNodes are :mod:`tests.support.light_node`, each behind a
:class:`tests.support.proxy.Proxy` where a test wants one. The server is the real one:
``fedcross.server.session.Session`` in a ServerApp process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from flwr.app import Context, Message

from fedcross.conf.compose import join
from fedcross.core.errors import FederationError
from fedcross.core.trust.keys import make_node_key
from fedcross.core.trust.signing import make_authority, make_server
from fedcross.engines import flower, guarded
from fedcross.engines.processes import Family
from fedcross.engines.superlink import IN_MEMORY, register
from tests.support import flower_app
from tests.support.warm import PYTHON, programs

ROOT = Path(__file__).parents[2]
#: A file of the network's own.
ON_DISK = ""
#: Seconds that a start may take: only a hanging program takes so long, and one that ends is noticed at once.
START_S = 600
#: For nodes of a run that goes on while a test does other things: each round then takes so many seconds at least, and
#: not all that the machine has.
CALM = {"FEDCROSS_TRAINING": "1.5"}
#: Three clients, all drawn. What the light clients do is known, and so is every digit of the result.
SETTINGS = (
    *("task=digits", "task.limit=200", "task.limit_test=100", "partition=iid", "partition.clients=3"),
    *("clients_per_round=3", "method.selection=in_order", "method.diagnostics_every=0", "defence.enabled=false"),
    *("logger=none", "evaluate_every=1000"),
)


class Network:
    """All processes of one federation; a context manager that leaves none behind.

    Parameters
    ----------
    work : Path
        Folder for logs, keys and state.
    clients : int
        Number of registered nodes.
    superexec : bool
        Whether a SuperExec starts the ServerApp; else :meth:`serve` is it.
    database : str
        The SuperLink's ``--database``; :data:`ON_DISK`: a file, for a SuperLink that starts again or whose deployment's
        way of storing is the subject. SQLite takes half of the CPU time of a request.
    address_space : int, optional
        Most bytes of addresses that the SuperLink may have.
    ready : str
        Whether the SuperExec keeps a process ready for the next run; no test but that one's own needs it.
    forked : bool
        Whether the SuperLink is forked (tests.support.warm) where what the test starts besides is new.
    """

    def __init__(
        self,
        work: Path,
        clients: int = 3,
        *,
        superexec: bool = True,
        database: str = IN_MEMORY,
        address_space: int | None = None,
        ready: str = "off",
        forked: bool = False,
    ) -> None:
        self._ready, self._forked = ready, forked
        self.work, self.clients, self._superexec = work, clients, superexec
        self._database, self._address_space = database, address_space
        self.visits = work / "visits"
        self._stack = contextlib.ExitStack()
        self._started: dict[str, int] = {}
        self.processes: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter(self, stack: contextlib.ExitStack) -> None:
        state = stack.enter_context(flower.scratch(self.work))
        self.authority = make_authority(state / "ca")
        server = make_server(self.authority, state / "server", [flower.LOOPBACK])
        self.keys = [make_node_key(state / "nodes", f"client-{i}") for i in range(self.clients)]
        (self.port,) = flower.free_ports(1)
        home = state / "flwr"
        flower.write_connection(home, self.port, self.authority.public)
        secret = state / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        secret.chmod(0o600)
        made = 'from tests.support.{} import app\n\n__all__ = ["app"]'
        self.app = flower_app.write(
            state / "app", "faultapp", client=made.format("light_node"), server=made.format("network_server")
        )
        self.environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FEDCROSS_NETWORK": str(self.work)}
        self.family = stack.enter_context(Family(self.work, flower.environment(home, self.environment), [state]))
        # A test that fails must not take the machine's memory.
        limit = [] if self._address_space is None else ["prlimit", f"--as={self._address_space}"]
        python = str(programs() / "python") if self._forked else sys.executable
        program = ("-m", "fedcross.deploy.patience", "flower-superlink")  # as fedcross deploy starts it
        self._superlink = [
            *limit,
            # Where its memory is what a test looks at, it is a process of its own from the start.
            *(PYTHON if limit else python, *program),
            *("--host", flower.LOOPBACK, "--port", str(self.port), "--isolation", "process"),
            *("--ssl-certfile", str(server.public), "--ssl-keyfile", str(server.private)),
            *("--ssl-ca-certfile", str(self.authority.public), "--enable-supernode-auth"),
            *("--database", self._database or str(state / "state.db"), "--superexec-auth-secret-file", str(secret)),
            "--disable-runtime-dependency-installation",
        ]
        self.start_superlink()
        self.secret = secret
        command = [
            *("env", f"{guarded.READY}={self._ready}", *guarded.command("flower-superexec")),
            *("--runtime-api-address", f"{flower.LOOPBACK}:{self.port}"),
            *("--root-certificates", str(self.authority.public), "--superexec-auth-secret-file", str(secret)),
        ]
        if self._superexec:
            self.start("superexec", command)
        with contextlib.closing(flower.control_client(self.port, self.authority.public)) as client:
            for key in self.keys:
                register(client, key)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process; started again it writes another log."""
        self._started[name] = self._started.get(name, 0) + 1
        self.processes[name] = self.family.start(f"{name}-{self._started[name]}", command)

    def start_superlink(self) -> None:
        """Start the SuperLink, with the state it left behind, and wait until it listens."""
        self.start("superlink", self._superlink)
        (self.work / "superlink.pid").write_text(str(self.processes["superlink"].pid))
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((flower.LOOPBACK, self.port), timeout=1).close()
            except OSError:
                if self.processes["superlink"].poll() is not None or time.monotonic() > deadline:
                    raise FederationError("the SuperLink did not start") from None
                time.sleep(0.1)
            else:
                return

    def start_nodes(self, name: str, partitions: Sequence[int], port: int | None = None, **environment: str) -> None:
        """Start one process that is the nodes of `partitions`, connected to `port` (a proxy's, say)."""
        keys = [f"{self.keys[i].private}={i}" for i in partitions]
        command = [sys.executable, "-m", "tests.support.light_node", str(port or self.port)]
        settings = [f"{key}={value}" for key, value in environment.items()]
        own = ["env", *settings] if settings else []
        self.start(name, [*own, *command, str(self.authority.public), str(self.visits), *keys])

    def stop(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process."""
        os.kill(self.processes[name].pid, number)

    def submit(self, output: Path, *overrides: str, kills: Sequence[tuple[str, int]] = ()) -> None:
        """Start a run that writes into `output`; at each (point, round) of `kills` it kills the SuperLink."""
        (self.work / "kills.json").write_text(json.dumps(kills))
        text = join([*SETTINGS, *overrides, f"output={output}"])
        config = flower.write_run_config(self.work / "run.toml", text)
        self.start(
            "run",
            [flower.executable("flwr"), "run", str(self.app), flower.CONNECTION, "--run-config", str(config)],
        )
        if self.processes["run"].wait(START_S) != 0:
            raise self.family.failure(f"run-{self._started['run']}", "flwr run failed.")

    def serve(self, output: Path, *overrides: str, kills: Sequence[tuple[str, int]] = ()) -> None:
        """Submit a run whose server is a process that is ready before: ``tests.support.network_server``."""
        text = join([*SETTINGS, *overrides, f"output={output}"])
        self.start(
            "server",
            [
                *(sys.executable, "-m", "tests.support.network_server", str(self.port)),
                *(str(self.authority.public), str(self.secret), text),
            ],
        )
        self.submit(output, *overrides, kills=kills)

    def wait(self, output: Path, seconds: float, *, restart: bool = False) -> int:
        """Wait for the end of the run; with `restart` start a killed SuperLink again. Return how often that was."""
        deadline, restarts = time.monotonic() + seconds, 0
        while not (output / "result.json").exists():
            if restart and self.processes["superlink"].poll() is not None:
                restarts += 1
                self.start_superlink()
            if "server" in self.processes and self.processes["server"].poll():
                raise self.family.failure(f"server-{self._started['server']}", "The server ended.")
            if (self.work / "server.log").exists():
                raise FederationError(f"the server ended: {(self.work / 'server.log').read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise FederationError(f"no result after {seconds:.0f} s; {len(lines(output))} rounds are done")
            time.sleep(0.1)
        return restarts


def lines(output: Path) -> list[dict[str, Any]]:
    """Return the rounds that are done."""
    path = output / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for_rounds(output: Path, count: int, seconds: float) -> None:
    """Wait until `count` rounds are done."""
    deadline = time.monotonic() + seconds
    while len(lines(output)) < count:
        if time.monotonic() > deadline:
            raise FederationError(f"{len(lines(output))} rounds after {seconds:.0f} s, {count} expected")
        time.sleep(0.1)


def wait_for_line(log: Path, text: str, seconds: float) -> None:
    """Return when a process's log holds `text`."""
    end = time.monotonic() + seconds
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < end, f"{log.name}: no {text!r} within {seconds} s"
        time.sleep(0.1)


def undisturbed(output: Path, *overrides: str, silent: Callable[[dict[str, Any]], bool] = lambda asked: False) -> str:
    """Return the SHA-256 of the final model of the same run without network, the `silent` requests unanswered."""
    from fedcross.conf.schema import load
    from fedcross.engines.grid import LocalGrid
    from fedcross.server.session import Session
    from tests.support.federation import Quiet
    from tests.support.killer import digest
    from tests.support.light_node import app as light

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and silent(dict(message.content.config_records["config"])):
            raise RuntimeError("silent")
        return light(message, context)

    settled = [*SETTINGS, *overrides, f"output={output}"]
    config = load(settled)
    clients = int(config.partition.clients)  # type: ignore[attr-defined]
    Session(config, LocalGrid(app, clients, {"overrides": join(settled)}), Quiet()).execute()
    return digest(output)
