"""A device with 40 % of the memory that the full model takes to train: its slice fits, the full model does not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedcross.engines import flower, superlink
from tests.support import flower_app
from tests.support.network import Network, lines
from tests.support.scale import WHOLE

pytestmark = [
    pytest.mark.superlink,
    pytest.mark.slow,
    pytest.mark.skipif(not WHOLE, reason="two minutes; make reliability runs it"),
    # Flower uses an old name of pathspec when it builds a bundle.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]

#: cgroup v1's and v2's folder of groups, the file with the limit, and the one with the peak.
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)
MIB = 1 << 20
LIMIT = 2400 * MIB
#: A network whose weights are most of a device's memory: 145 million of them, 580 MB; at width .4 they are 94 MB.
SETTINGS = (
    *("task=digits", "task.limit=60", "task.limit_test=30", "partition=iid", "partition.clients=2", "model=mlp"),
    *("model.hidden=[12000,12000]", "train.epochs=1", "train.batch=10", "clients_per_round=2", "rounds=1"),
    *("method=fedcross", "method.widths=[1.0,0.4]", "method.diagnostics_every=0", "logger=none", "checkpoint.every=9"),
    *("federation.deadline_s=600", "evaluate_every=1"),
)


class Group:
    """A control group of this test, with a limit on the memory of the processes in it."""

    def __init__(self, name: str, limit: int | None) -> None:
        for top, most, peak in GROUPS:
            self._folder, self._peak = top / f"fedcross-{os.getpid()}-{name}", peak
            with contextlib.suppress(OSError):
                self._folder.mkdir()
                if (self._folder / peak).exists():
                    if limit is not None:
                        (self._folder / most).write_text(str(limit))
                    return
                self._folder.rmdir()
        pytest.skip("no control group for memory can be made here (it needs root and cgroup v1, or v2 with 'memory')")

    def inside(self, command: list[str]) -> list[str]:
        """Return a command that starts `command` in this group."""
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh", *command]

    @property
    def peak(self) -> int:
        return int((self._folder / self._peak).read_text())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()


@contextlib.contextmanager
def group(name: str, limit: int | None) -> Iterator[Group]:
    made = Group(name, limit)
    try:
        yield made
    finally:
        made.close()


def federation(work: Path, limit: int, width: float, *overrides: str) -> tuple[list[dict[str, Any]], int, int]:
    """Run two devices, the second in `limit` bytes with `width`; return the rounds and the peak of both in bytes."""
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(group("full", None)), stack.enter_context(group("small", limit))]
        network = stack.enter_context(Network(work / "work", clients=2, superexec=True))
        network.app = flower_app.write(
            work / "app",
            "smallapp",
            client='from fedcross.client.app import app\n\n__all__ = ["app"]',
            server='from tests.support.network_server import app\n\n__all__ = ["app"]',
        )
        for i, (own, at) in enumerate(zip(groups, flower.free_ports(2), strict=True)):
            command = superlink.supernode_command(
                network.port, at, network.authority.public, network.keys[i], i, 2, network.secret
            )
            if i:
                command[-1] += f" device.width={width}"
            network.start(f"device-{i}", own.inside(command))
        output = work / "run"
        network.submit(output, *SETTINGS, *overrides)
        network.wait(output, 800)
        return lines(output), groups[0].peak, groups[1].peak


def test_a_device_with_two_fifths_of_the_memory_takes_part(tmp_path: Path) -> None:
    """The full model's memory is the peak of the device beside it, which trains that model without a limit."""
    (only,), full, small = federation(tmp_path, LIMIT, 0.4)
    assert 0.4 * full >= LIMIT, (full, small)
    assert small <= LIMIT
    assert (only["clients"], only["dropped"], only["rejected"]) == (2, 0, {})
    assert set(only["width_accuracy"]) == {"1", "0.4"}


def test_the_full_model_does_not_fit(tmp_path: Path) -> None:
    """The same device without a word on its width: its worker is killed, and the round goes on without it."""
    (only,), _, small = federation(tmp_path, LIMIT, 1.0, "method.widths=[]", "federation.deadline_s=240")
    assert small == LIMIT
    assert only["dropped"] == 1
