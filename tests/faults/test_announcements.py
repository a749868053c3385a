"""A registered device announces replies that Flower would build into GiB, orders in the server's name and times that
are no numbers: the SuperLink refuses them and goes on.
"""

import re
from pathlib import Path

import pytest

from tests.faults.test_bombs import MIB, memory
from tests.support.killer import digest
from tests.support.network import IN_MEMORY, ON_DISK, Network, lines, undisturbed, wait_for_line, wait_for_rounds

pytestmark = [pytest.mark.superlink, pytest.mark.slow, pytest.mark.usefixtures("warm_start")]
LEVELS = 28
#: Without the guard the SuperLink ends here, and not with the machine.
ADDRESSES = 6 << 30
#: How the reasons begin for which the SuperLink refuses what the device pushes.
REASONS = {
    "an object is announced",
    "one object is announced",
    "more than 2048 objects",
    "objects nested more than",
    "a request and not",
    "it was made at",
    "it lives for nan",
    "the work took nan",
}


@pytest.mark.parametrize("database", [IN_MEMORY, ON_DISK], ids=["memory", "sqlite"])
def test_a_registered_device_cannot_fill_the_superlink(tmp_path: Path, database: str) -> None:
    """The device announces trees in round 1 and is honest in round 2; the model is as if it had been silent.

    The server is told of each refusal at once: the round does not wait until its deadline. Before, the device announces
    wrong children of the server's query and of the other devices' answers, which come later and are not held up.
    """
    reference = undisturbed(
        tmp_path / "whole", "rounds=2", silent=lambda asked: asked["client"] == 2 and asked["round"] == 1
    )
    with Network(tmp_path / "work", database=database, address_space=ADDRESSES) as network:
        superlink = network.processes["superlink"].pid
        network.start_nodes("hostile", [2], FEDCROSS_ATTACK="trees", FEDCROSS_LEVELS=str(LEVELS))
        network.submit(tmp_path / "run", "rounds=2", "federation.deadline_s=3600")  # nobody waits for it
        wait_for_line(tmp_path / "work" / "hostile-1.log", "lie: announced", 300)
        network.start_nodes("honest", [0, 1])
        before = memory(superlink, "VmRSS")
        wait_for_rounds(tmp_path / "run", 2, 500)
        network.wait(tmp_path / "run", 120)
        peak = memory(superlink, "VmHWM")
    print(f"SuperLink: {before / MIB:.0f} MiB before, {peak / MIB:.0f} MiB at most")
    done, found = digest(tmp_path / "run"), lines(tmp_path / "run")
    log = (tmp_path / "work" / "superlink-1.log").read_text()
    assert "announcement: accepted" not in (tmp_path / "work" / "hostile-1.log").read_text()
    refused = re.findall(r"refused a reply of node (\d+): (.*) \(\d+ of it", log)
    assert len({node for node, _ in refused}) == 1
    assert {" ".join(why.split()[:4]) for _, why in refused} == REASONS
    assert 0 < peak < 1.3 * before
    assert [line["dropped"] for line in found] == [1, 0]
    assert found[0]["rejected"] == {"refused": 2}  # the first request, and the one that repeats it
    assert done == reference
