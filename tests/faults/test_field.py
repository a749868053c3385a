"""A device in the field: it is added while a run is on, stopped, and started again with the same key."""

import contextlib
import signal
import time

import pytest

from fedcross.core.trust.keys import make_node_key
from fedcross.engines import flower
from fedcross.engines.superlink import register
from tests.support.network import CALM, Network, lines, wait_for_rounds

pytestmark = [pytest.mark.superlink, pytest.mark.slow, pytest.mark.usefixtures("warm_start")]
PATIENCE_S = 600
DEADLINE_S = 5.0


def wait_until(output, condition, meanwhile=lambda: None):
    """Wait for a round, of those that end from now on, whose line meets `condition`."""
    before, deadline = len(lines(output)), time.monotonic() + PATIENCE_S
    while not any(condition(line) for line in lines(output)[before:]):
        assert time.monotonic() < deadline, lines(output)[-3:]
        meanwhile()
        time.sleep(0.2)


def all_three(line):
    return line["clients"] == 3 and not line["dropped"]


def test_a_device_is_added_stopped_and_started_again_while_a_run_is_on(tmp_path):
    output = tmp_path / "run"
    with Network(tmp_path / "work", clients=2, superexec=False) as network:
        network.start_nodes("first", [0, 1], **CALM)
        rules = (f"federation.deadline_s={DEADLINE_S}", "federation.min_clients=2")
        network.serve(output, "rounds=100000", *rules)
        wait_for_rounds(output, 2, PATIENCE_S)
        assert {line["clients"] for line in lines(output)} == {2}

        network.keys.append(make_node_key(tmp_path / "new", "late"))
        with contextlib.closing(flower.control_client(network.port, network.authority.public)) as client:
            register(client, network.keys[2])
        network.start_nodes("late", [2], **CALM)
        wait_until(output, all_three)

        network.stop("late", signal.SIGKILL)
        wait_until(output, lambda line: line["clients"] - line["dropped"] == 2)
        starts = []

        def again():
            """Start it until it stays, as Docker and systemd do: until its last heartbeat is old it is refused."""
            if network.processes["late"].poll() is not None:
                starts.append(time.monotonic())
                time.sleep(5)
                network.start_nodes("late", [2], **CALM)

        wait_until(output, all_three, again)
        print(f"taking part again {time.monotonic() - starts[0]:.0f} s and {len(starts)} starts after the first")
