"""A SuperExec with a process that is ready: which runs get it, which Flower starts, and what a kill leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from fedcross.engines import flower
from tests.support import flower_app
from tests.support.network import Network

pytestmark = [
    pytest.mark.superlink,
    pytest.mark.slow,
    # Flower uses an old name of pathspec when it builds a bundle.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]
PATIENCE_S = 300
SERVER = """
import json
import os
import sys
from pathlib import Path

from flwr.serverapp import ServerApp

torch = "torch" in sys.modules
app = ServerApp()


def commands():
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes()
        except OSError:
            continue


@app.main()
def main(grid, context):
    token = sys.argv[sys.argv.index("--token") + 1].encode()
    found = {{"pid": os.getpid(), "torch": torch, "version": {version!r}, "program": os.path.basename(sys.argv[0])}}
    found["name"] = Path("/proc/self/comm").read_text().strip()
    found["shown"] = any(token in command for command in commands())
    partial = Path({file!r} + ".part")
    partial.write_text(json.dumps(found))
    partial.rename({file!r})
"""
CLIENT = "from flwr.clientapp import ClientApp\n\napp = ClientApp()"


def wait_for(find: Callable[[], Any], what: str) -> Any:
    """Return what `find` finds, once that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := find()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)
    return found


class Server:
    """The SuperExec of a network, and runs of small apps."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.pid = network.processes["superexec"].pid

    def run(self, version: str, name: str = "fedcross", publisher: str = "fedcross") -> dict[str, Any]:
        """Return what the ServerApp of a new run of this app tells."""
        file, app = self.folder / f"{version}.json", self.folder / version
        flower_app.write(app, name, client=CLIENT, server=SERVER.format(version=version, file=str(file)))
        project = app / "pyproject.toml"
        project.write_text(project.read_text().replace('publisher = "test"', f'publisher = "{publisher}"'))
        fab = build_fab_from_disk(app)
        port, authority = self.network.port, self.network.authority.public
        with contextlib.closing(flower.control_client(port, authority)) as client:
            client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
        wait_for(file.exists, f"word of the ServerApp of {version}")
        told: dict[str, Any] = json.loads(file.read_text())
        assert told["version"] == version
        assert told["program"] == told["name"] == "flwr-serverapp"
        return told

    def waiting(self) -> int | None:
        """Return the process that is ready and imports torch or has done so, if there is one."""
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            place = Path("/proc") / child
            with contextlib.suppress(OSError):
                part = b"serverapp" in (place / "cmdline").read_bytes().split(b"\0")
                has_run = (place / "comm").read_text().strip() == "flwr-serverapp"
                if part and not has_run and "libtorch_python" in (place / "maps").read_text():
                    return int(child)
        return None


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has waited for has too."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_runs_get_a_ready_process_and_everything_else_goes_flowers_way(tmp_path: Path) -> None:
    with Network(tmp_path / "work", clients=0, ready="on", forked=True) as network:
        server = Server(network, tmp_path)
        ready = wait_for(server.waiting, "process that is ready")
        first = server.run("first")
        assert first["pid"] == ready
        assert first["torch"]
        assert not first["shown"]  # no process list shows its token

        second = server.run("second")  # none is ready yet
        assert second["pid"] != ready
        assert not second["torch"]
        assert second["shown"]  # Flower's way

        ready = wait_for(server.waiting, "second process that is ready")
        other = server.run("other", "toy", "test")
        assert other["pid"] != ready
        assert not other["torch"]
        assert server.waiting() == ready

        os.kill(ready, signal.SIGKILL)
        third = server.run("third")
        assert third["pid"] != ready
        assert not third["torch"]

        ready = wait_for(server.waiting, "third process that is ready")
        network.stop("superexec", signal.SIGKILL)
        wait_for(lambda: has_ended(ready), "end of the process that was ready")
