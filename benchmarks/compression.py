"""The loss of accuracy from fewer bytes: FedCross with exact, float16 and int8 models on the wire, same seeds.

python -m benchmarks.compression                     # digits and MNIST (FEDCROSS_DATA), 30 rounds, E = 1
python -m benchmarks.compression --tasks digits --seeds 1 2 3 4 5
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import machine
from fedcross.server.launch import launch

KINDS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "int8": ("int8", "int8"),
    "int8 up only": ("float32", "int8"),
}
TASKS = {
    "digits": ["task=digits", "partition.clients=20", "train.lr=0.05"],
    "mnist": ["task=mnist", "task.limit=20000", "partition.clients=100", "train.lr=0.05"],
}


def run(task: str, kind: str, seed: int, rounds: int) -> tuple[float, float, int]:
    """Return final accuracy, best smoothed accuracy (shares) and bytes of one run."""
    down, up = KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="fedcross-compression-") as folder:
        settings = [
            *TASKS[task],
            *(f"seed={seed}", f"rounds={rounds}", "train.epochs=1", "partition.beta=0.5", "evaluate_every=1"),
            *(f"compression.down={down}", f"compression.up={up}", "defence.enabled=false"),
            *("engine.workers=1", "device=cpu", "logger=none", "checkpoint.every=1000"),
        ]
        result = json.loads((launch(settings, Path(folder)) / "result.json").read_text())
    return result["final_accuracy"], result["smoothed_accuracy"]["mean"], result["bytes_total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows = []
    for task in options.tasks:
        found = {
            kind: np.array([run(task, kind, seed, options.rounds) for seed in options.seeds], np.float64)
            for kind in KINDS
        }
        exact = found["float32"]
        for kind, cells in found.items():
            loss = 100 * (exact[:, :2] - cells[:, :2])
            rows.append(
                f"| {task} | {kind} | {cells[:, 2].mean() / exact[:, 2].mean():.3f} | {100 * cells[:, 0].mean():.2f} | "
                f"{loss[:, 0].mean():+.2f} ({loss[:, 0].min():+.2f} to {loss[:, 0].max():+.2f}) | "
                f"{100 * cells[:, 1].mean():.2f} | {loss[:, 1].mean():+.2f} |"
            )
    print(f"\n{machine()} {options.rounds} rounds, E = 1, seeds {options.seeds}.\n")
    print("| task | wire | bytes | final accuracy, % | lost, points (range over seeds) | best 10 rounds, % | lost |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
