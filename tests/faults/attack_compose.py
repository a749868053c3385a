"""An hour of mixed attack on a compose federation, with restarts of everything, and whether it left a trace.

::

    python -m tests.faults.attack_compose --minutes 60 --seed 1 --work FOLDER

needs a container engine (and ``BASE_IMAGE`` where no registry can be reached). Three clients train, one run after the
other, while in a seeded order slow bodies, idle sockets and noise reach the gateway, a fourth device with a registered
key claims another's partition and forges replies in others' names (errors, bombs of 2,200 MiB, nonsense), and
SuperLink, SuperExec (with the ServerApp), gateway and clients are restarted. A killed run is resumed.

FOLDER/progress.log gets a line per event, FOLDER/result.json the outcome. A run is judged against the same run
on the local engine in which the same replies are missing: both models must have the same SHA-256.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcross.deploy.device import Device, new_client
from tests.support import containers
from tests.support.attack_reference import accepted, lost, reference
from tests.support.containers import CLIENTS, IMAGE, Federation, Submitted, docker
from tests.support.killer import digest

GATEWAY = "gateway:8443"
TASK = [
    "task=arrays",
    "task.classes=10",
    "task.shape=[1,28,28]",
    "task.test_fraction=0",
    "model=mlp",
    "model.hidden=[32]",
]
METHOD = ["method=fedcross", "method.k=5", "clients_per_round=3", "train.epochs=1", "logger=none"]
# A log of all accepted replies until the end: it says which ones the model was made of.
RULES = ["defence.enabled=true", "federation.deadline_s=240", "federation.resend_s=45", "checkpoint.every=1000"]
#: Seconds after which a run without a ServerApp counts as killed.
PATIENCE_S = 45
REQUESTS = """
import json, sqlite3
rows = sqlite3.connect("file:/state/superlink.db?mode=ro", uri=True, timeout=5)
rows.row_factory = sqlite3.Row
wanted = "run_id, message_id, src_node_id, dst_node_id, group_id, created_at, ttl, message_type"
train = "message_type like 'train%'"
found = rows.execute(f"select {wanted} from message_ins where {train} order by created_at desc limit 5")
bits = lambda name, value: value % 2**64 if name.endswith(("run_id", "node_id")) else value
print(json.dumps([{name: bits(name, row[name]) for name in row.keys()} for row in found]))
"""


@dataclass
class Outcome:
    """What is written down."""

    minutes: float
    seed: int
    ok: bool = False
    actions: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    runs: list[dict[str, Any]] = field(default_factory=list)
    memory_mib: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, int] = field(default_factory=dict)


class Attack:
    """The attack and its witness."""

    def __init__(self, federation: Federation, work: Path, options: argparse.Namespace) -> None:
        self.federation, self.work, self.options = federation, work, options
        self.outcome = Outcome(options.minutes, options.seed)
        self.draw = random.Random(options.seed)
        self.memory: dict[str, list[int]] = {"serverapp": [], "superlink": []}
        self.node: subprocess.Popen[str] | None = None
        self.last_restart = self.alive = time.monotonic()

    def say(self, text: str) -> None:
        """Add a line to the log."""
        with (self.work / "progress.log").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def attacker(self, *command: str, stdin: bool = False) -> list[str]:
        """Return the command of one container on the clients' network, with the tests and the attacker's bundle."""
        mounts = ["-v", f"{self.federation.folder}/tests:/attack/tests:ro", "-v", f"{self.work}/mallory:/bundle:ro"]
        limits = [
            "--cpus",
            "0.3",
            "--memory",
            "1g",
            "--user",
            "10001:10001",
            "--label",
            f"attack={self.federation.name}",
        ]
        where = [
            "--network",
            f"{self.federation.name}_edge",
            "-e",
            "PYTHONPATH=/attack",
            "-e",
            "FLWR_TELEMETRY_ENABLED=0",
        ]
        own = ["docker", "run", "--rm", *(["-i"] if stdin else []), *limits, *where, *mounts, IMAGE]
        return [
            *own,
            "python",
            "-m",
            "tests.support.attacker",
            command[0],
            GATEWAY,
            "/bundle/keys/ca.crt",
            *command[1:],
        ]

    # ---- what happens -------------------------------------------------------------------------------------------

    def strangers(self, kind: str, count: int) -> None:
        """Attack without credentials for half a minute, from an address of its own."""
        log = (self.work / "strangers.log").open("a")
        command = self.attacker(kind, "30", str(count), str(self.draw.randrange(1000)))
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start_node(self) -> None:
        """Start the fourth device, which claims partition 0."""
        with (self.work / "node.log").open("a") as log:
            command = self.attacker("node", "/bundle/keys/mallory-node.key", "0", stdin=True)
            self.node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)

    def forge(self, kind: str) -> None:
        """Answer a request that is under way in its addressee's name."""
        requests = json.loads(self.federation.python("superlink", REQUESTS))
        if self.node is None or self.node.poll() is not None:
            self.start_node()
        if requests and self.node is not None and self.node.stdin is not None:
            self.node.stdin.write(json.dumps({**self.draw.choice(requests), "kind": kind}) + "\n")
            self.node.stdin.flush()

    def restart(self, service: str) -> None:
        """Kill a container and start it again six seconds later."""
        container = self.federation.container(service)
        docker("kill", container, check=False)
        time.sleep(6)
        docker("start", container, check=False)
        self.last_restart = time.monotonic()

    def act(self) -> None:
        """Do the next thing."""
        kinds = ["slow", "slow", "idle", "garbage", "garbage", "spoofed error", "spoofed error", "bomb", "nonsense"]
        rested = time.monotonic() - self.last_restart > self.options.restart_every
        kind = "restart" if rested else self.draw.choice(kinds)
        what = self.draw.choice(self.options.restarts) if kind == "restart" else ""
        if what == "clients":
            what = self.draw.choice(CLIENTS)
        self.outcome.actions[f"{kind} {what}".strip()] += 1
        self.say(f"{kind} {what}")
        if kind == "restart":
            self.restart(what)
        elif kind in ("slow", "idle", "garbage"):
            self.strangers(kind, {"slow": 80, "idle": 2050, "garbage": 100}[kind])
        else:
            self.forge(kind)

    # ---- the run ------------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        """Note the memory of the server's processes; return whether there is a ServerApp."""
        found = False
        for service, name, key in (
            ("superexec", "flwr-serverapp", "serverapp"),
            ("superlink", "flower-superlink", "superlink"),
        ):
            listed = docker("top", self.federation.container(service), "-eo", "pid,rss,comm,args", check=False).stdout
            sizes = [int(line.split()[1]) for line in listed.splitlines()[1:] if name in line]
            if sizes:
                self.memory[key].append(max(sizes) // 1024)
                found |= key == "serverapp"
        return found

    def one(self, number: int, end: float) -> dict[str, Any]:
        """Do one run under attack until it has a result, and judge it."""
        name = f"run-{number}"
        overrides = [*TASK, *METHOD, *RULES, f"rounds={self.options.rounds}", f"seed={self.options.seed + number}"]
        everything = " ".join([*overrides, "partition=local"])
        folder = self.federation.folder / "outputs" / name
        submitted: list[Submitted] = [self.federation.submit(everything, name)]
        began = self.alive = time.monotonic()
        seen: set[tuple[int, int]] = set()
        resumed = 0
        while not (folder / "result.json").exists():
            seen |= accepted(folder)
            rounds = len(submitted[0].lines())
            if rounds and "first round" not in self.outcome.seconds:
                self.outcome.seconds["first round"] = round(time.monotonic() - began)
                self.say(f"first round after {self.outcome.seconds['first round']} s")
            if self.watch():
                self.alive = time.monotonic()
            elif time.monotonic() - self.alive > PATIENCE_S:
                resumed += 1
                self.alive = time.monotonic() + 60
                self.say(f"{name}: no ServerApp after round {rounds}, resumed")
                more = f"{everything} resume=/outputs/{name}" if folder.exists() else everything
                submitted.append(self.federation.submit(more, name))
            if time.monotonic() - began > self.options.minutes * 60 + 1800:
                self.say(f"{name}: given up after round {rounds}")
                return {"name": name, "finished": False, "rounds": rounds, "resumed": resumed}
            if 1 <= rounds < self.options.rounds - 1 and time.monotonic() < end:
                with contextlib.suppress(Exception):
                    self.act()
            time.sleep(self.draw.uniform(2, 8))
        for one in submitted:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(30)
            one.process.kill()
        lines = submitted[0].lines()
        missing = lost(lines, seen, len(CLIENTS))
        told = {"name": name, "finished": True, "seconds": round(time.monotonic() - began), "resumed": resumed}
        told |= {"rounds": [line["round"] for line in lines][-1:], "lost": missing, "sha": digest(folder)}
        rejected: Counter[str] = Counter()
        for line in lines:
            rejected.update(line["rejected"])
        local = [*overrides, "partition=natural"]
        told["reference"] = reference(self.work / f"local-{number}", self.work / "data" / "together", local, missing)
        told |= {"rejected": dict(rejected), "equal": told["sha"] == told["reference"]}
        self.say(json.dumps(told))
        return told

    def save(self) -> None:
        """Write the outcome as far as it is known."""
        for key, sizes in self.memory.items():
            if sizes:
                early = max(sizes[: max(len(sizes) // 20, 5)])
                self.outcome.memory_mib[key] = {
                    "start": early,
                    "most": max(sizes),
                    "ratio": round(max(sizes) / early, 2),
                }
        runs, memory = self.outcome.runs, self.outcome.memory_mib
        fine = all(run["finished"] and run["equal"] for run in runs)
        self.outcome.ok = bool(runs) and fine and all(one["ratio"] <= 1.3 for one in memory.values())
        text = (self.work / "node.log").read_text().splitlines() if (self.work / "node.log").exists() else []
        told = [json.loads(line) for line in text if line.startswith('{"kind"')]
        self.outcome.answers = Counter(f"{one['kind']}: {one['told'][:60]}" for one in told)
        (self.work / "result.json").write_text(json.dumps(vars(self.outcome), indent=1) + "\n")

    def whole(self) -> None:
        """Attack for so many minutes, and until the last run has ended."""
        began = time.monotonic()
        self.federation.compose("build", "superexec", "gateway")
        self.outcome.seconds["build"] = round(time.monotonic() - began)
        self.say(f"built in {self.outcome.seconds['build']} s")
        began = time.monotonic()
        self.federation.compose("up", "-d", "superexec", "gateway", *CLIENTS)
        self.federation.wait_for_nodes(3, 600)
        self.outcome.seconds["up"] = round(time.monotonic() - began)
        self.say(f"up in {self.outcome.seconds['up']} s")
        end = time.monotonic() + self.options.minutes * 60
        authority = self.work / "ca.crt"
        authority.write_text(self.federation.python("superlink", "print(open('/keys/server/ca.crt').read())"))
        bundle = new_client(Device("mallory", GATEWAY, 3, 4), authority, self.work)
        subprocess.run(["chown", "-R", "10001:10001", str(bundle)], check=True)
        public = (bundle / "keys" / "mallory-node.pub").read_text()
        self.say(self.federation.admin("register", "--no-partition", "-", stdin=public).strip())
        self.start_node()
        number = 0
        while number == 0 or time.monotonic() < end:
            number += 1
            self.say(f"run {number} begins")
            self.outcome.runs.append(self.one(number, end))
            self.save()
            if not self.outcome.runs[-1]["finished"]:
                break
        self.say(f"done: ok {self.outcome.ok}")

    def stop(self) -> None:
        """End the attackers' containers."""
        if self.node is not None:
            self.node.kill()
        for one in docker("ps", "-q", f"--filter=label=attack={self.federation.name}").stdout.split():
            docker("kill", one, check=False)


def main() -> int:
    """Attack, and return 0 if it left no trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, default=40, help="of each run; runs follow each other until the time is up"
    )
    parser.add_argument("--restart-every", type=float, default=60, metavar="S", help="seconds between two restarts")
    parser.add_argument("--restarts", nargs="+", default=["superlink", "superexec", "gateway", "clients", "clients"])
    parser.add_argument("--work", type=Path, required=True, help="folder for data, logs and result.json; made anew")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True)
    work.chmod(0o755)
    containers.deal(work / "data")
    with Federation(work / "clone", containers.places(work / "data")) as federation:
        attack = Attack(federation, work, options)
        try:
            attack.whole()
        finally:
            attack.stop()
            attack.save()
    return 0 if attack.outcome.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
