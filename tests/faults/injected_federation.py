"""Faults of a federation on a network: SuperLink, SuperExec and nodes are real processes. Cause -> what injects it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedcross.core.trust.keys import make_node_key
from tests.faults.injected_here import Injection, federation
from tests.support.injection import PATIENCE_S, SMALL, Bench, Told, descendants, wait_until
from tests.support.network import Network, lines

#: The federation that the injections of this module share.
SHARED: list[Network] = []


@contextlib.contextmanager
def shared(work: Path) -> Iterator[None]:
    """Keep one federation up inside the block; its nodes are started by the injections."""
    with Network(work) as network:
        SHARED.append(network)
        try:
            yield
        finally:
            SHARED.clear()


def where() -> tuple[str, str]:
    """Return address and authority of the shared SuperLink."""
    (network,) = SHARED
    return f"127.0.0.1:{network.port}", str(network.authority.public)


def managed(bench: Bench, *arguments: str) -> Told:
    """Return what ``fedcross deploy`` says at the shared SuperLink."""
    address, authority = where()
    return bench.ends("deploy", *arguments, "--superlink", address, "--authority", authority)


def remote(bench: Bench, met: Callable[[Bench], bool], *more: str) -> Told:
    """Return what a run on the shared SuperLink says, counted from when its ServerApp has `met` the fault."""
    address, authority = where()
    engine = ("engine=remote", f"engine.address={address}", f"engine.authority={authority}")
    task = (
        "task=digits",
        "task.limit=200",
        "task.limit_test=50",
        "partition=iid",
        "partition.clients=3",
        "logger=none",
    )
    run = (*task, "clients_per_round=3", "rounds=1", *more, f"output={bench.folder / 'run'}")
    process = bench.fedcross(*engine, *run)
    since: list[float] = []

    def begun() -> bool:
        since.extend([time.monotonic()] * met(bench))
        return bool(since) or ended(process)

    wait_until(begun, PATIENCE_S)
    return process.told((since or [process.started])[0])


def looked(bench: Bench) -> bool:
    """Return whether the ServerApp has begun: it looks for clients as soon as its folder is there."""
    return (bench.folder / "run" / "digests.jsonl").exists() or (bench.folder / "run" / "metrics.jsonl").exists()


def asked(bench: Bench) -> bool:
    """Return whether a node has been asked to train."""
    visits = SHARED[0].visits.read_text() if SHARED[0].visits.exists() else ""
    return any(not line.endswith(" 0") for line in visits.splitlines())  # 0: asked who it is


def ended(process: object) -> bool:
    """Return whether a process has ended."""
    return process.process.poll() is not None  # type: ignore[attr-defined]


@contextlib.contextmanager
def nodes(partitions: list[int], **variables: str) -> Iterator[None]:
    """Have these nodes online inside the block."""
    from fedcross.deploy.nodes import connect, listing

    (network,) = SHARED
    address, authority = where()
    with connect(address, Path(authority)) as client:

        def online(count: int) -> bool:
            return sum(node.status == "online" for node in listing(client)) == count

        assert wait_until(lambda: online(0), PATIENCE_S)  # those of the injection before are forgotten after a minute
        network.start_nodes("nodes", partitions, **variables)
        try:
            assert wait_until(lambda: online(len(partitions)), PATIENCE_S)
            yield
        finally:
            network.stop("nodes", signal.SIGKILL)


def unknown_key(bench: Bench) -> Told:
    """Revoke a key that nobody has registered."""
    return managed(bench, "revoke", str(make_node_key(bench.folder / "new", "new").public))


def key_bound(bench: Bench) -> Told:
    """Register a second key for a partition that has one."""
    first, second = (make_node_key(bench.folder / name, name).public for name in ("first", "second"))
    assert managed(bench, "register", "--partition", "77", str(first)).code == 0
    return managed(bench, "register", "--partition", "77", str(second))


def no_clients(bench: Bench) -> Told:
    """Run with no device connected."""
    return remote(bench, looked, "federation.wait_s=4")


def too_few_clients(bench: Bench) -> Told:
    """Run with one of three devices connected."""
    with nodes([0]):
        return remote(bench, looked, "federation.wait_s=4")


def wrong_shapes(bench: Bench) -> Told:
    """Let all devices have another model."""
    with nodes([0, 1, 2], FEDCROSS_OTHER_SHAPE="1"):
        return remote(bench, asked, "federation.wait_s=60")


def superlink_lost(bench: Bench) -> Told:
    """Kill the SuperLink of a run that goes on."""
    output = bench.folder / "run"
    run = [one for one in SMALL if not one.startswith(("engine.workers", "partition.clients"))]
    engine = ("engine=superlink", "partition.clients=2", "rounds=100000", f"output={output}")
    process = bench.fedcross(*run, *engine)
    wait_until(lambda: len(lines(output)) >= 1 or ended(process), PATIENCE_S)
    assert not ended(process), process.text
    found = [pid for pid, command in descendants(process.process.pid) if "flower-superlink" in command]
    since = time.monotonic()
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return process.told(since)


def app_refused(bench: Bench) -> Told:
    """Submit a run to something that is no SuperLink, with the right certificate."""
    from fedcross.core.trust.keys import KeyPair

    keys = federation(bench)
    port = bench.answers(KeyPair(keys / "server" / "server.crt", keys / "server" / "server.key"), 200)
    engine = ("engine=remote", f"engine.address=localhost:{port}", f"engine.authority={keys / 'public' / 'ca.crt'}")
    return bench.ends("task=digits", "logger=none", *engine, "rounds=1", f"output={bench.folder / 'run'}")


FEDERATION: dict[str, Injection] = {
    one.__name__: one
    for one in (unknown_key, key_bound, no_clients, too_few_clients, wrong_shapes, superlink_lost, app_refused)
}
