"""What ends a run and what must not: a configuration that all clients refuse, and a claim to another's partition."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from tests.faults.injected_here import refusing
from tests.support import warm
from tests.support.network import Network, lines, wait_for_rounds

PATIENCE_S = 1500
SETTINGS = (
    *("method=refusing", "task=digits", "rounds=3", "partition.clients=2", "clients_per_round=2", "logger=none"),
    *("task.limit=100", "task.limit_test=50"),
)
ENGINES = [
    pytest.param("local", marks=pytest.mark.slow),
    pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    pytest.param("superlink", marks=[pytest.mark.superlink, pytest.mark.slow]),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_all_clients_refuse_ends_the_run_with_their_words(tmp_path, engine):
    output = tmp_path / "run"
    own = {"local": ["engine.workers=1"], "ray": ["engine.cpus=1"]}.get(engine, [])  # one process for both clients
    with contextlib.nullcontext() if engine == "local" else warm.started_warm():
        done = warm.run(
            ["-m", "fedcross", *SETTINGS, f"engine={engine}", *own, f"output={output}"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "FEDCROSS_PATH": refusing(tmp_path / "own"),
            },
            timeout=PATIENCE_S,
        )
    told = done.stdout + done.stderr
    assert done.returncode != 0, told[-3000:]
    assert "All 2 clients of round 1 refuse: this device has no such sensor. Leave the method out." in told
    assert "Traceback" not in done.stderr.splitlines()[-1]
    assert lines(output) == []


@pytest.mark.superlink
@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_second_device_cannot_take_a_partition(tmp_path):
    """The thief has a registered key of its own and claims the partition of a device that trains already."""
    output = tmp_path / "run"
    with Network(tmp_path / "work", clients=4) as network:
        network.start_nodes("honest", [0, 1, 2])
        network.submit(output, "rounds=10", "federation.deadline_s=300")
        wait_for_rounds(output, 2, PATIENCE_S)
        command = [sys.executable, "-m", "tests.support.light_node", str(network.port)]
        files = [str(network.authority.public), str(network.visits), f"{network.keys[3].private}=2"]
        network.start("thief", [*command, *files])
        network.wait(output, PATIENCE_S)
        asked = {line.split()[2] for line in network.visits.with_suffix(".requests").read_text().splitlines()}
    found = lines(output)
    assert len(asked) == 3
    assert [line["dropped"] for line in found] == [0] * 10
    assert sum(line["rejected"].get("partition_taken", 0) for line in found) == 1
