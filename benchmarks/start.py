"""Seconds from a run's submission to its first round, on a SuperLink that waits for runs.

    python -m benchmarks.start                 # a process per run as Flower starts it, and one that is ready before
    python -m benchmarks.start --turns 2 --dry

One SuperLink with TLS; for each turn a SuperExec of its own, once with and once without the process that is ready
(``FEDCROSS_READY``). The SuperExec has been idle for a while when the run comes. There are no SuperNodes: the first
round begins, and the run is stopped. CPU seconds are those of the ServerApp's process from the submission on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.common import cpu, machine, machine_cpu, write_section
from fedcross.conf.compose import join
from fedcross.core.private_files import write_private
from fedcross.core.trust.signing import make_authority, make_server
from fedcross.engines import bundle, flower, guarded, runs
from fedcross.engines.processes import Family

SETTINGS = (
    *("task=digits", "method=fedcross", "partition=iid", "partition.clients=3", "clients_per_round=3", "rounds=1"),
    "logger=none",
)
WAYS = {"Flower's: a process per run": "off", "a process that is ready": "on"}
PULLED = "/v1/runtime/pull-task-input"
PATIENCE_S, IDLE_S, POLL_S = 180.0, 3.0, 0.01


class Server:
    """A SuperLink, to which runs are submitted."""

    def __init__(self, family: Family, state: Path, port: int) -> None:
        self.family, self.port = family, port
        self.authority = make_authority(state / "ca")
        pair = make_server(self.authority, state / "server", [flower.LOOPBACK])
        self.secret = state / "superexec.key"
        write_private(self.secret, secrets.token_bytes(32))
        command = [
            *guarded.command("flower-superlink"),
            *("--host", flower.LOOPBACK, "--port", str(port), "--isolation", "process"),
            *("--ssl-certfile", str(pair.public), "--ssl-keyfile", str(pair.private)),
            *("--ssl-ca-certfile", str(self.authority.public), "--superexec-auth-secret-file", str(self.secret)),
            *("--database", str(state / "state.db"), "--disable-runtime-dependency-installation"),
        ]
        family.start("superlink", command)
        flower.wait_for_superlink(family, port)

    @contextlib.contextmanager
    def superexec(self, name: str, way: str) -> Iterator[int]:
        """Start a SuperExec in one of the :data:`WAYS`, and yield its process's id."""
        command = [
            *("env", f"FEDCROSS_READY={way}", *guarded.command("flower-superexec")),
            *("--runtime-api-address", f"{flower.LOOPBACK}:{self.port}"),
            *("--root-certificates", str(self.authority.public)),
            *("--superexec-auth-secret-file", str(self.secret)),
        ]
        process = self.family.start(name, command)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(60)

    def pulled(self) -> int:
        """Return how many ServerApps have asked for their input."""
        return self.family.log("superlink").read_text(errors="replace").count(PULLED)

    def turn(self, name: str, way: str, fab: bytes, output: Path) -> dict[str, float]:
        """Submit one run into `output`; return the seconds to its steps, and CPU seconds."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        before_it = self.pulled()
        steps: dict[str, Callable[[], bool]] = {
            "process": lambda: self.pulled() > before_it,  # Flower is imported
            "app": output.exists,  # torch and fedcross too, the configuration is composed
            "first round": lambda: any((output / "checkpoints").glob("*")),  # data and model are there
        }
        with (
            self.superexec(name, way) as pid,
            contextlib.closing(flower.control_client(self.port, self.authority.public)) as client,
        ):
            wait(lambda: settled(pid), "an idle SuperExec")
            before, start, others = spent(pid), time.monotonic(), machine_cpu()
            sent = fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
            config = user_config_to_proto({"overrides": join([*SETTINGS, f"output={output}"])})
            run = client.StartRun(StartRunRequest(fab=sent, override_config=config)).run_id
            found = {"submitted": time.monotonic() - start}
            for step, holds in steps.items():
                wait(holds, f"{step} of the run in {output}")
                found[step] = time.monotonic() - start
            found["cpu"] = spent(pid) - before
            found["others"] = (machine_cpu() - others - found["cpu"]) / found["first round"] / (os.cpu_count() or 1)
            runs.stop(client, run)
        return found


def spent(pid: int) -> float:
    """Return the CPU seconds of a SuperExec and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return cpu([pid, *map(int, children)])


def settled(pid: int) -> bool:
    """Return whether a SuperExec and its children have used less than 5 % of a core for some seconds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        before = spent(pid)
        time.sleep(IDLE_S)
        return before > 1.0 and spent(pid) - before < 0.05 * IDLE_S
    return False


def wait(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds`."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)


def measure(turns: int) -> str:
    """Return the table."""
    from flwr.cli.build import build_fab_from_disk

    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as place:
        folder = Path(place)
        fab = build_fab_from_disk(bundle.make(folder / "app"))
        (port,) = flower.free_ports(1)
        with Family(folder, flower.environment(folder / "flwr")) as family:
            server = Server(family, folder, port)
            for number in range(turns):
                for way, setting in WAYS.items():
                    name = f"{number}-{setting}"
                    cell = server.turn(f"superexec-{name}", setting, fab, folder / f"run-{name}")
                    print(f"  {way}: {json.dumps({key: round(value, 2) for key, value in cell.items()})}", flush=True)
                    found[way].append(cell)
    head = "| ServerApp | asks for its input, s | app is loaded, s | first round begins, s (range) | CPU s |"
    lines = [f"{head} others' CPU |"]
    lines.append("|---|---|---|---|---|---|")
    for way, cells in found.items():
        whole = [cell["first round"] for cell in cells]
        middle = {key: median(cell[key] for cell in cells) for key in cells[0]}
        spread = f"{median(whole):.1f} ({min(whole):.1f}-{max(whole):.1f})"
        lines.append(
            f"| {way} | {middle['process']:.1f} | {middle['app']:.1f} | {spread} "
            f"| {middle['cpu']:.1f} | {middle['others']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    given = parser.parse_args()
    text = measure(given.turns)
    print(text)
    if not given.dry:
        load = f"Load of the machine: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores."
        write_section("start", f"{machine()}\n\n{load} Medians of {given.turns} turns:\n\n{text}")


if __name__ == "__main__":
    main()
