"""Faults of a real network: a SuperLink that dies, a link that is down, a node that stops, a node that lies."""

import os
import signal
import time
from collections import Counter

import pytest

from tests.support.impostor import KINDS
from tests.support.killer import digest
from tests.support.network import ON_DISK, Network, lines, undisturbed, wait_for_rounds
from tests.support.network_server import POINTS
from tests.support.proxy import Proxy
from tests.support.scale import WHOLE

pytestmark = [
    pytest.mark.superlink,
    pytest.mark.slow,
    pytest.mark.skipif(not WHOLE, reason="federations of many minutes: make reliability"),
]
#: Flower's nodes report every 30 s.
HEARTBEAT_S = 30
DEADLINE_S = 15
PATIENCE_S = 2400


def test_a_killed_superlink_loses_nothing(tmp_path):
    """One round per kill; the run's own process goes on, and asks again until the SuperLink is back.

    A request or a reply may be on its way when the SuperLink dies, and Flower does not send it again: we do.
    """
    kills = [(point, 2 + i) for i, point in enumerate(list(POINTS) * 5)]
    rounds = f"rounds={len(kills) + 2}"
    reference = undisturbed(tmp_path / "whole", rounds)
    with Network(tmp_path / "work", superexec=False, database=ON_DISK) as network:
        network.start_nodes("nodes", [0, 1, 2])
        network.serve(tmp_path / "run", rounds, "federation.resend_s=20", kills=kills)
        restarts = network.wait(tmp_path / "run", PATIENCE_S, restart=True)
        done = digest(tmp_path / "run")
    found = lines(tmp_path / "run")
    again, lost = sum(line["clients"] - 3 for line in found), sum(line["dropped"] for line in found)
    print(f"{restarts} kills of the SuperLink, {lost} visits lost, {again} requests repeated")
    assert restarts == len(kills)
    assert [line["round"] for line in found] == list(range(1, len(kills) + 3))
    assert done == reference


def test_a_killed_server_continues_from_its_log(tmp_path):
    """The ServerApp's process is killed; Flower gives its run up, and ours goes on with ``resume``."""
    reference = undisturbed(tmp_path / "whole", "rounds=4")
    with Network(tmp_path / "work") as network:
        network.start_nodes("nodes", [0, 1, 2], FEDCROSS_TRAINING="1")
        network.submit(tmp_path / "run", "rounds=4")
        wait_for_rounds(tmp_path / "run", 2, PATIENCE_S)
        os.kill(int((network.work / "server.pid").read_text()), signal.SIGKILL)
        assert not (tmp_path / "run" / "result.json").exists()
        network.submit(tmp_path / "run", "rounds=4", f"resume={tmp_path / 'run'}")
        network.wait(tmp_path / "run", PATIENCE_S)
        assert digest(tmp_path / "run") == reference


def recovered(output, after, seconds):
    """Wait for a round, begun or not before, that ends after now with all three clients; return the seconds."""
    started = time.monotonic()
    while True:
        if any(line["dropped"] == 0 and line["clients"] == 3 for line in lines(output)[after:]):
            return time.monotonic() - started
        assert time.monotonic() - started < seconds, f"not recovered after {seconds} s"
        time.sleep(0.2)


def test_a_stopped_node_and_a_link_that_is_down(tmp_path):
    """One federation: SIGSTOP of one node, then partitions of another; rounds go on meanwhile and all come back."""
    output = tmp_path / "run"
    with (
        Network(tmp_path / "work", superexec=False) as network,
        Proxy(network.port, latency=0.005) as proxy,
    ):
        network.start_nodes("behind", [0], proxy.port)
        network.start_nodes("direct", [1])
        network.start_nodes("stopped", [2])
        rules = (f"federation.deadline_s={DEADLINE_S}", "federation.min_clients=2")
        network.serve(output, "rounds=100000", *rules)
        wait_for_rounds(output, 2, PATIENCE_S)

        network.stop("stopped", signal.SIGSTOP)
        before = len(lines(output))
        wait_for_rounds(output, before + 2, PATIENCE_S)
        slowest = max(line["seconds"] for line in lines(output)[before:])
        network.stop("stopped", signal.SIGCONT)
        print(f"SIGSTOP: slowest round {slowest:.1f} s, deadline {DEADLINE_S} s")
        lost = any(line["dropped"] for line in lines(output)[before:])
        recovered(output, len(lines(output)) + 1, PATIENCE_S)

        times = []
        for seconds in (10, 60, 180):
            before = len(lines(output))
            proxy.partition()
            time.sleep(seconds)
            meanwhile = len(lines(output)) - before
            proxy.heal()
            took = recovered(output, before + meanwhile, PATIENCE_S)
            print(f"partition of {seconds} s: {meanwhile} rounds meanwhile, all clients again {took:.1f} s after it")
            times.append(took)
    assert lost
    assert slowest <= DEADLINE_S + 5
    assert max(times) <= 2 * HEARTBEAT_S


@pytest.mark.parametrize("kind", KINDS)
def test_an_impostor_is_never_believed(tmp_path, kind):
    """Whatever it sends counts for nothing: the model is the one of a federation that it only was silent in.

    Flower gives out one reply to a request, and a false one may be first. So who replays has no say from then on, and a
    node in whose name another one answers must be asked again.
    """
    each, rounds = 250, "rounds=6"

    def silent(asked):
        return kind == "replay" and asked["client"] == 2 and asked["round"] > 1

    reference = undisturbed(tmp_path / "whole", rounds, silent=silent)
    again = ("federation.resend_s=20",) if kind == "spoof" else ()
    with Network(tmp_path / "work", superexec=False) as network:
        network.start_nodes("honest", [0, 1])
        network.start_nodes("impostor", [2], FEDCROSS_ATTACK=kind, FEDCROSS_ATTACKS=str(each))
        network.serve(tmp_path / "run", rounds, "federation.deadline_s=300", *again)
        network.wait(tmp_path / "run", PATIENCE_S)
        outcomes = Counter(network.visits.with_suffix(".attack").read_text().split())
    told: Counter[str] = Counter()
    for line in lines(tmp_path / "run"):
        told.update(line["rejected"])
    print(f"{kind}: {dict(outcomes)} at the SuperLink, {dict(told)} at the server, 0 accepted")
    assert outcomes.total() >= 4 * each
    assert digest(tmp_path / "run") == reference
