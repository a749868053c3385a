"""The cost of one message in its ClientApp process: Flower's own imports, the trainer inside it, the resident trainer.

    python -m benchmarks.message

It runs without a SuperLink, so that Flower's waiting does not hide the cost and a busy machine disturbs it less. A
process imports what ``flwr-clientapp`` imports and answers one train message (LeNet-5, one example). The variants take
turns. CPU seconds count only that process; with the resident trainer, another process does the training step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import Workload, images, machine
from fedcross.client.resident.connect import Keeper, Resident
from fedcross.conf.compose import join
from fedcross.conf.schema import load
from fedcross.tasks.models import create

CONTESTANTS = ("floor", "inside", "resident")
PROCESS = """
import time; start = time.perf_counter()
import json, os, sys
import flwr.supernode.runtime.run_clientapp
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
import numpy
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
_, turn, weights, config, overrides = sys.argv
arrays = ArrayRecord({name: Array(array) for name, array in numpy.load(weights).items()})
content = RecordDict({"arrays": arrays, "config": ConfigRecord(json.loads(config))})
message = Message(content, dst_node_id=1, message_type="train")
message.metadata.__dict__["_message_id"] = "m"
context = Context(1, 1, {"partition-id": 0}, RecordDict(), {"overrides": overrides})
if turn == "floor":
    answer = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    reply = Message(answer, reply_to=message)
else:
    from fedcross.client.app import _work
    reply = _work("train", message, context)
assert len(reply.content["arrays"]) == len(arrays)
print(json.dumps([time.perf_counter() - start, time.process_time()]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcross-message-") as scratch:
        folder = Path(scratch)
        images(Workload("wire", "lenet5", clients=3, examples=10), folder)
        settings = ["task=arrays", f"task.root={folder}", "task.classes=10", "model=lenet5", "partition=iid"]
        settings += ["partition.clients=3", "clients_per_round=3", "train.epochs=1", "train.examples=1", "device=cpu"]
        config = load(settings)
        model = create(config.modules["model"], config.model, config.load_data().task, config.seed)
        weights = folder / "weights.npz"
        np.savez(weights, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
        asked = {"run": "r", "round": 1, "exchange": 0, "client": 0, "slot": 0, "nonce": "n", "rounds": 9}
        asked |= {"state": 0, "keep": 0, "visit": 1}
        Resident(Keeper.of(os.getpid())).prepare(join(settings))
        found: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
        for turn in range(options.turns + 1):
            for name in CONTESTANTS:
                done = subprocess.run(
                    [sys.executable, "-c", PROCESS, name, str(weights), json.dumps(asked), join(settings)],
                    env={**os.environ, "FEDCROSS_TRAINER": name, "FEDCROSS_STATE": str(folder / "states")},
                    check=True,
                    capture_output=True,
                    text=True,
                )
                if turn:  # the first turn warms the page cache and waits for the trainer
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(machine(), f"{options.turns} turns.\n")
    print("| ClientApp process | s, median (range) | over the floor, s | CPU s | over the floor, CPU s |")
    print("|---|---|---|---|---|")
    floor = np.median(found["floor"], axis=0)
    for name, cells in found.items():
        wall = [cell[0] for cell in cells]
        cpu = median(cell[1] for cell in cells)
        print(
            f"| {name} | {median(wall):.2f} ({min(wall):.2f}-{max(wall):.2f}) | {median(wall) - floor[0]:+.2f} | "
            f"{cpu:.2f} | {cpu - floor[1]:+.2f} |"
        )


if __name__ == "__main__":
    main()
