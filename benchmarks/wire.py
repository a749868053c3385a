"""What a round costs beside training: seconds and bytes between three SuperNodes on this machine.

    python -m benchmarks.wire                      # floor, trainer inside, resident trainer; LeNet-5, one example
    python -m benchmarks.wire --only resident --set compression.down=int8 --set compression.up=int8

Contestants take turns. The floor is a ClientApp that imports nothing of ours nor torch and sends back what it got, with
the same server, model and messages. Seconds are those between the first message pushed and the last reply pulled,
bytes those that a relay between SuperNodes and SuperLink passed on (TLS, HTTP, heartbeats and polls included). The
first rounds of a run are left out: they carry the app's bundle and start the trainer.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import Workload, images, machine
from conf.compose import join
from engines import bundle, superlink

SKIP = 2
CLIENTS = 3
FLOOR = '''
"""A ClientApp that sends back what it got: Flower's own cost."""
from flwr.app import ConfigRecord, MetricRecord, Message, RecordDict
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
    content = RecordDict({
        "arrays": message.content["arrays"],
        "config": ConfigRecord({name: asked[name] for name in ECHO}),
        "metrics": MetricRecord({"num-examples": 1, "train-loss": 0.0}),
    })
    return Message(content, reply_to=message)
'''
CONTESTANTS = {"floor": "auto", "inside": "inside", "resident": "auto"}


class Meter:
    """A relay in front of a port that counts the bytes of both directions."""

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
        """Take no more connections."""
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


class Rounds(threading.Thread):
    """Notes how many bytes had passed when each line of ``metrics.jsonl`` appeared."""

    def __init__(self, file: Path, meter: Meter) -> None:
        super().__init__(daemon=True)
        self.file, self.meter = file, meter
        self.marks: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Look every 20 ms."""
        while not self.over.wait(0.02):
            lines = self.file.read_text().count("\n") if self.file.exists() else 0
            self.marks += [self.meter.bytes] * (lines - len(self.marks))


def app_folder(folder: Path, floor: bool) -> Path:
    """Return a Flower app: ours, or ours with the floor's ClientApp."""
    made = bundle.make(folder)
    if floor:
        project = made / "pyproject.toml"
        project.write_text(project.read_text().replace("client.app:app", "floor:app"))
        (made / "floor.py").write_text(FLOOR)
    return made


def federation(name: str, data: Path, rounds: int, settings: Sequence[str]) -> tuple[list[float], list[float], float]:
    """Run `rounds` rounds; return seconds and bytes of each, the first ones left out, and bytes of one model."""
    with tempfile.TemporaryDirectory(prefix="fedcross-wire-") as scratch:
        folder = Path(scratch)
        overrides = [
            *("task=arrays", f"task.root={data}", "task.classes=10", "model=lenet5", "method=fedcross"),
            *("partition=iid", f"partition.clients={CLIENTS}", f"clients_per_round={CLIENTS}"),
            *("train.epochs=1", "train.examples=1", "device=cpu", "logger=none", "evaluate_every=100000"),
            *(f"rounds={rounds}", f"output={folder / 'run'}", "federation.wait_s=600", *settings),
        ]
        meter = Meter()
        watch = Rounds(folder / "run" / "metrics.jsonl", meter)
        watch.start()
        variables = {"FEDCROSS_TRAINER": CONTESTANTS[name], "FEDCROSS_STATE": str(folder / "states")}
        try:
            superlink.launch(
                None,
                join(overrides),
                CLIENTS,
                folder / "engine",
                app=app_folder(folder / "app", name == "floor"),
                extra_environment=variables,
                sink=lambda _: None,
                relay=meter,
            )
            time.sleep(0.1)
        finally:
            watch.over.set()
            meter.close()
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        model = sum(line["bytes_down"] for line in lines) / len(lines) / CLIENTS
    passed = [float(b - a) for a, b in zip(watch.marks, watch.marks[1:])]
    return [line["seconds_training"] for line in lines[SKIP:]], passed[SKIP - 1 :], model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds of each run")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", choices=[*CONTESTANTS], nargs="*", default=[*CONTESTANTS])
    parser.add_argument("--set", action="append", default=[], dest="settings", help="further settings of the run")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in options.only}
    passed: dict[str, list[float]] = {name: [] for name in options.only}
    model = 0.0
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="fedcross-wire-") as scratch:
        data = images(Workload("wire", "lenet5", clients=CLIENTS, examples=10), Path(scratch)).parent
        for turn in range(options.turns):
            for name in options.only:
                took, bytes_, model = federation(name, data, options.rounds + SKIP, options.settings)
                seconds[name] += took
                passed[name] += bytes_
                shown = " ".join(f"{s:.1f}" for s in took)
                print(f"turn {turn + 1} {name}: {shown} s; {median(bytes_) / 1e6:.3f} MB a round", flush=True)
    exact = 2 * CLIENTS * 4 * 62_006
    print("\n| contestant | s a round, median (range) | over the floor, s | MB a round | of 2K float32 models |")
    print("|---|---|---|---|---|")
    for name in options.only:
        own = seconds[name]
        over = f"{median(own) - median(seconds['floor']):.1f}" if "floor" in seconds else ""
        size = median(passed[name])
        print(
            f"| {name} | {median(own):.1f} ({min(own):.1f}-{max(own):.1f}) | {over} | {size / 1e6:.3f} | "
            f"{size / exact:.3f} |"
        )
    print(f"\nArrays of one model: {model:.0f} bytes.")


if __name__ == "__main__":
    main()
