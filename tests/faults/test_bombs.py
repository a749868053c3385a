"""Replies that a hostile device with a registered key makes by hand: none is put together, none ends the run."""

import re
import time
from pathlib import Path

import pytest

from tests.support.bombs import INFLATED, KINDS, MIB, counted
from tests.support.killer import digest
from tests.support.network import Network, lines, undisturbed

pytestmark = [pytest.mark.superlink, pytest.mark.slow, pytest.mark.usefixtures("warm_start")]
PATIENCE_S = 1500
#: What the ServerApp's process may grow by; the bomb would be 2,200 MiB and more.
GROWTH = 200 * MIB


def memory(pid, field):
    """Return a field of the process's status in bytes; 0 when it has ended."""
    try:
        found = re.search(rf"{field}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def test_a_registered_device_cannot_end_the_run_by_what_it_sends(tmp_path):
    """Kind after kind, one a round; the model is that of a federation in which the device was silent meanwhile."""
    rounds = len(KINDS) + 1
    reference = undisturbed(
        tmp_path / "whole",
        f"rounds={rounds}",
        silent=lambda asked: asked["client"] == 2 and asked["round"] <= len(KINDS),
    )
    with Network(tmp_path / "work") as network:
        network.start_nodes("honest", [0, 1])
        network.start_nodes("hostile", [2], FEDCROSS_ATTACK="bomb")
        network.submit(tmp_path / "run", f"rounds={rounds}", "federation.deadline_s=90")
        before, peak = start_and_peak(network, tmp_path / "run")
        done = digest(tmp_path / "run")
    found = lines(tmp_path / "run")
    print(f"ServerApp: {before / MIB:.0f} MiB after the start, {peak / MIB:.0f} MiB at most; {INFLATED} MiB not made")
    assert peak - before < GROWTH
    for line, make in zip(found, KINDS):
        assert line["dropped"] == 1, line
        assert line["rejected"] == counted(make), line
    assert found[-1]["dropped"] == 0
    assert done == reference


def start_and_peak(network, output):
    """Wait for the run's end; return the ServerApp's memory before its first round, and its peak."""
    deadline, before, peak = time.monotonic() + PATIENCE_S, 0, 0
    pid_file = network.work / "server.pid"
    while not (output / "result.json").exists():
        assert time.monotonic() < deadline, f"{len(lines(output))} rounds are done"
        assert not (network.work / "server.log").exists(), (network.work / "server.log").read_text()[-2000:]
        if pid_file.exists():
            pid = int(pid_file.read_text())
            if not before and (output / "checkpoints").exists():
                before = memory(pid, "VmRSS")
            peak = max(peak, memory(pid, "VmHWM"))
            assert not before or peak - before < 4 * GROWTH, f"{peak / MIB:.0f} MiB"
        time.sleep(0.05)
    return before, peak
