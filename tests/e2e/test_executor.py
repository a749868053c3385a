"""One device with its worker, against a SuperLink with TLS and node keys; the server's part is played by the test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.serverapp import Grid
from flwr.supercore.fab import Fab
from flwr.supercore.task_identity import TaskIdentity

from fedcross.engines import flower, superlink
from fedcross.engines.executor import supervisor
from tests.support import flower_app
from tests.support.inner_server import grid
from tests.support.network import Network
from tests.support.strays import left_behind

pytestmark = [
    pytest.mark.superlink,
    pytest.mark.slow,
    # Flower uses an old name of pathspec when it builds a bundle.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]
PATIENCE_S = 300
CLIENT = """
import os
import signal
import sys

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
app.stays_loaded = {stays}
app.told = 0


@app.query()
def query(message: Message, context: Context) -> Message:
    if message.content["ask"]["die"]:
        os.kill(os.getpid(), signal.SIGKILL)
    app.told += 1
    record = ConfigRecord({{
        "pid": os.getpid(), "version": {version!r}, "told": app.told, "program": os.path.basename(sys.argv[0]),
        "others": sorted(name for name in sys.modules if "fedcross." in name or name == "torch"),
        "commands": open("/proc/self/cmdline").read() + open(f"/proc/{{os.getppid()}}/cmdline").read(),
    }})
    return Message(RecordDict({{"reply": record}}), reply_to=message)
"""


class Device:
    """A SuperNode and its worker."""

    def __init__(self, network: Network) -> None:
        self.network = network
        (self.port,) = flower.free_ports(1)

    def start(self, secret: Path) -> None:
        key, authority = self.network.keys[0], self.network.authority.public
        own = (self.network.port, self.port, authority, key, 0, 1)
        self.network.start("device", superlink.supernode_command(*own, secret))

    def end(self, number: signal.Signals) -> int:
        process = self.network.processes["device"]
        os.kill(process.pid, number)
        return int(process.wait(60))


class Run:
    """A run of the app in `version`, whose server is this process."""

    def __init__(self, network: Network, found: Grid, version: str) -> None:
        self.grid, self.version = found, version
        self.task, self.run = TaskIdentity.task_id, TaskIdentity.run_id
        self.network = network

    def ask(self, *, die: bool = False) -> Message:
        """Return the device's reply to one message."""
        TaskIdentity.task_id, TaskIdentity.run_id = self.task, self.run
        deadline = time.monotonic() + PATIENCE_S
        while not (nodes := list(self.grid.get_node_ids())):
            assert time.monotonic() < deadline, "the device does not connect"
            time.sleep(0.2)
        ask = RecordDict({"ask": ConfigRecord({"die": die})})
        [reply] = self.grid.send_and_receive(
            [Message(ask, dst_node_id=nodes[0], message_type="query")], timeout=PATIENCE_S
        )
        return reply

    def told(self) -> dict[str, Any]:
        """Return what the device's app says."""
        reply = self.ask()
        said = dict(reply.content["reply"])
        assert said["version"] == self.version
        assert said["others"] == []
        return said


@contextlib.contextmanager
def run(network: Network, folder: Path, version: str, *, stays: bool = True) -> Iterator[Run]:
    """Start a run of the toy app, and be its server."""
    flower_app.write(folder, "toy", client=CLIENT.format(version=version, stays=stays))
    fab = build_fab_from_disk(folder)
    with contextlib.closing(flower.control_client(network.port, network.authority.public)) as client:
        client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
    with grid(network.port, network.authority.public, network.secret) as found:
        yield Run(network, found, version)


def test_a_device_answers_in_one_process_whatever_happens_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCROSS_TEST", token := os.urandom(8).hex())
    inherited = f"FEDCROSS_TEST={token}"
    with Network(tmp_path / "work", clients=1, superexec=False, forked=True) as network, contextlib.ExitStack() as runs:
        device = Device(network)
        device.start(network.secret)
        first = runs.enter_context(run(network, tmp_path / "a", "1"))
        one, two = first.told(), first.told()
        assert (one["pid"], one["told"], one["program"]) == (two["pid"], 1, "fedcross-executor")
        assert two["told"] == 2

        asked = time.monotonic()
        lost = first.ask(die=True)  # the worker dies in its visit
        assert lost.has_error()
        assert lost.error.reason == "The worker process ended while it worked on this message (signal 9)."
        assert time.monotonic() - asked < 60  # Flower's own way notices it after a minute and more
        three = first.told()
        assert three["pid"] != two["pid"]
        assert three["told"] == 1

        changed = runs.enter_context(run(network, tmp_path / "b", "2"))  # two runs at once, with two versions
        four, five = changed.told(), first.told()
        assert len({three["pid"], four["pid"], five["pid"]}) == 3
        assert four["told"] == five["told"] == 1

        foreign = runs.enter_context(run(network, tmp_path / "c", "3", stays=False))
        six, seven = foreign.told(), foreign.told()
        assert six["pid"] != seven["pid"]
        assert (six["program"], seven["program"]) == ("fedcross-executor", "flwr-clientapp")
        assert "--token-file" in seven["commands"]

        secret = network.secret.read_bytes()
        for said in (one, seven):
            assert "--token\0" not in said["commands"]
            assert secret.hex() not in said["commands"]

        assert device.end(signal.SIGTERM) >= 0
        device.start(network.secret)  # the SuperNode starts again
        assert first.told()["told"] == 1

        device.end(signal.SIGKILL)  # nothing survives the supervisor
        deadline = time.monotonic() + 60
        while left := [one for one in left_behind(inherited) if "flower-supernode" in one or "program.py" in one]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

        wrong = tmp_path / "wrong"
        wrong.write_bytes(b"another secret of 32 bytes length")
        log = network.family.log(f"device-{network._started['device'] + 1}")
        key, authority = network.keys[0], network.authority.public
        own = (network.port, device.port, authority, key, 0, 1, network.secret)
        command = superlink.supernode_command(*own)
        command[command.index("--secret") + 1] = str(wrong)
        network.start("device", command)
        assert network.processes["device"].wait(PATIENCE_S) == supervisor.REFUSED
        assert "refuses this executor's secret" in log.read_text()
