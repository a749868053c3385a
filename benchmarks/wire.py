"""The cost of a round besides training: seconds and bytes with three SuperNodes on this machine.

    python -m benchmarks.wire                      # all of them; LeNet-5, one example
    python -m benchmarks.wire --only resident executor --blocks 2
    python -m benchmarks.wire --only resident --set model=cnn_w
    python -m benchmarks.wire --only resident --set compression.down=int8 --set compression.up=int8

The variants of Flower's way, a process per message, take turns round by round in one federation, so that all have the
same load; the executor needs SuperNodes of its own, so its federation and theirs take turns in blocks. The floor is a
ClientApp that imports neither fedcross nor torch and sends back the received model, with the same server, model and
messages. Seconds count from the first message pushed to the last reply pulled; bytes are those that a relay between
SuperNodes and SuperLink passed on (TLS, HTTP, heartbeats and polls included). CPU seconds are those of the SuperNodes
and of all processes below them (a resident trainer is not), polls while they wait included, for each of a round's
three messages.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from unittest import mock

from benchmarks.common import Workload, images, machine, write_section
from fedcross.conf.compose import join
from fedcross.core.trust.keys import KeyPair
from fedcross.engines import bundle, superlink

CLIENTS = 3
TURNS = '''
"""A ClientApp that takes turns, round by round: Flower's own cost, our trainer inside, our resident trainer."""
import os

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
ECHO = ("run", "round", "exchange", "client", "slot", "nonce")


@app.query()
def who(message, context):
    own = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"config": own}), reply_to=message)


@app.train()
def train(message, context):
    asked = message.content["config"]
    turns = os.environ["TURNS"].split()
    turn = turns[asked["round"] % len(turns)]
    if turn != "floor":  # what we import is ours
        os.environ["FEDCROSS_TRAINER"] = turn if turn != "executor" else "auto"
        from fedcross.client.app import _work

        return _work("train", message, context)
    content = RecordDict({
        "arrays": message.content["arrays"],
        "config": ConfigRecord({name: asked[name] for name in ECHO}),
        "metrics": MetricRecord({"num-examples": 1, "train-loss": 0.0}),
    })
    return Message(content, reply_to=message)
'''
CONTESTANTS = ("floor", "inside", "resident", "executor")
EXECUTOR = "executor"
WITH_EXECUTOR = superlink.supernode_command
TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """A relay to a port that counts the bytes in both directions."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._target = 0

    def __call__(self, port: int) -> int:
        """Start to relay to `port` and return the port to connect to."""
        self._target = port
        threading.Thread(target=self._accept, daemon=True).start()
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """Stop accepting connections."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    self.bytes += len(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()


def device_cpu() -> float:
    """Return the CPU seconds so far of the SuperNodes below this process and of all that they have started."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    roots = set()
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            command = (place / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(place.name)
        parents[pid] = int(fields[1])
        spent[pid] = sum(map(int, fields[11:15])) / TICKS  # its own, and those of the children it has waited for
        if b"--superlink" in command and parents[pid] == os.getpid():
            roots.add(pid)

    def below(pid: int) -> bool:
        while pid and pid not in roots:
            pid = parents.get(pid, 0)
        return bool(pid)

    return sum(spent[pid] for pid in spent if below(pid))


def plain_supernode(
    superlink_port: int, own_port: int, authority: Path, key: KeyPair, partition: int, partitions: int, secret: Path
) -> list[str]:
    """Return the command of a SuperNode as Flower starts it: with a SuperExec and a process per message."""
    command = WITH_EXECUTOR(superlink_port, own_port, authority, key, partition, partitions, secret)
    command = command[command.index("--") + 1 :]
    isolation = command.index("--isolation")
    return command[:isolation] + command[isolation + 4 :]


class Rounds(threading.Thread):
    """Notes bytes and CPU seconds up to the moment when each line of ``metrics.jsonl`` appeared."""

    def __init__(self, file: Path, meter: Meter) -> None:
        super().__init__(daemon=True)
        self.file, self.meter = file, meter
        self.marks: list[tuple[int, float]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Look every 20 ms."""
        while not self.over.wait(0.02):
            lines = self.file.read_text().count("\n") if self.file.exists() else 0
            if lines > len(self.marks):
                self.marks += [(self.meter.bytes, device_cpu())] * (lines - len(self.marks))


def app_folder(folder: Path, turns: Sequence[str]) -> Path:
    """Return the fedcross Flower app: as it is for the executor, else with the ClientApp that takes turns."""
    made = bundle.make(folder)
    if turns == [EXECUTOR]:
        return made
    project = made / "pyproject.toml"
    project.write_text(project.read_text().replace("fedcross:client_app", "turns:app"))
    (made / "turns.py").write_text(TURNS)
    return made


def federation(
    turns: Sequence[str], data: Path, rounds: int, settings: Sequence[str]
) -> list[tuple[str, float, float, float, float]]:
    """Run `rounds` rounds of each variant; return variant, seconds, bytes, array bytes, CPU s a message of each."""
    command = superlink.supernode_command if turns == [EXECUTOR] else plain_supernode
    with tempfile.TemporaryDirectory(prefix="fedcross-wire-") as scratch:
        folder = Path(scratch)
        total = (rounds + 1) * len(turns) + 1
        overrides = [
            *("task=arrays", f"task.root={data}", "task.classes=10", "model=lenet5", "method=fedcross"),
            *("partition=iid", f"partition.clients={CLIENTS}", f"clients_per_round={CLIENTS}"),
            *("train.epochs=1", "train.examples=1", "device=cpu", "logger=none", "evaluate_every=100000"),
            *(f"rounds={total}", f"output={folder / 'run'}", "federation.wait_s=600", *settings),
        ]
        meter = Meter()
        watch = Rounds(folder / "run" / "metrics.jsonl", meter)
        watch.start()
        try:
            with mock.patch.object(superlink, "supernode_command", command):
                superlink.launch(
                    None,
                    join(overrides),
                    CLIENTS,
                    folder / "engine",
                    app=app_folder(folder / "app", turns),
                    extra_environment={"TURNS": " ".join(turns), "FEDCROSS_STATE": str(folder / "states")},
                    sink=lambda _: None,
                    relay=meter,
                )
            time.sleep(0.1)
        finally:
            watch.over.set()
            meter.close()
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    # The first rounds carry the app's bundle and start the trainer; the last one's bytes are not delimited.
    return [
        (
            turns[line["round"] % len(turns)],
            line["seconds_training"],
            float(watch.marks[line["round"] - 1][0] - watch.marks[line["round"] - 2][0]),
            float(line["bytes_down"] + line["bytes_up"]),
            (watch.marks[line["round"] - 1][1] - watch.marks[line["round"] - 2][1]) / CLIENTS,
        )
        for line in lines[len(turns) : -1]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds of each contestant")
    parser.add_argument("--blocks", type=int, default=2, help="federations of each kind, which take turns")
    parser.add_argument("--only", choices=CONTESTANTS, nargs="*", default=CONTESTANTS)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="further settings of the run")
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    options = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="fedcross-wire-") as scratch:
        data = images(Workload("wire", "lenet5", clients=CLIENTS, examples=10), Path(scratch)).parent
        kinds = [[one for one in options.only if one != EXECUTOR], [one for one in options.only if one == EXECUTOR]]
        found = []
        for _ in range(options.blocks):
            for turns in filter(None, kinds):
                found += federation(turns, data, -(-options.rounds // options.blocks), options.settings)
    for name, seconds, passed, arrays, cpu in found:
        print(f"{name}: {seconds:.1f} s, {passed / 1e6:.3f} MB, of it arrays {arrays / 1e6:.3f} MB, {cpu:.2f} CPU s")
    floor = median([seconds for name, seconds, *_ in found if name == "floor"] or [0.0])
    columns = ("contestant", "s a round, median (range)", "over the floor, s", "CPU s a message", "MB a round")
    table = ["| " + " | ".join([*columns, "times its arrays"]) + " |"]
    table.append("|---|---|---|---|---|---|")
    for name in options.only:
        own = [seconds for n, seconds, *_ in found if n == name]
        size = median(passed for n, _, passed, _, _ in found if n == name)
        arrays = median(a for n, _, _, a, _ in found if n == name)
        cpu = median(c for n, _, _, _, c in found if n == name)
        table.append(
            f"| {name} | {median(own):.1f} ({min(own):.1f}-{max(own):.1f}) | {median(own) - floor:+.1f} | "
            f"{cpu:.2f} | {size / 1e6:.3f} | {size / arrays:.3f} |"
        )
    text = "\n".join([f"LeNet-5, three SuperNodes, {options.rounds} rounds each:", "", *table])
    print(f"\n{text}")
    if not options.dry:
        write_section("wire", f"{machine()}\n\n{text}")


if __name__ == "__main__":
    main()
