"""Visits a minute over a network of three devices, one of them four times slower: FedCross beside ``fedcross_async``.

::

    python -m benchmarks.visits           # two federations of each in turns, writes docs/performance.md
    python -m benchmarks.visits --dry --step 0.02 --rounds 3 --turns 1

Each federation is a SuperLink with three SuperNodes on this machine (``engine=superlink``). The digits' network sleeps
in each step of training, so a visit takes as long as on a device of that speed, whatever else this machine does; the
third client has four times the examples of the others and so four times the steps. The first round, in which the
devices load app and data, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from unittest import mock

from benchmarks.common import machine, write_section
from fedcross.server.launch import launch

FAST, SLOW, BATCH, EPOCHS = 50, 200, 10, 10
WAYS: Mapping[str, tuple[str, ...]] = {
    "fedcross, waits for all": ("method=fedcross",),
    "fedcross_async": ("method=fedcross_async", "clock=real"),
}
NETWORK = '''
"""A small network whose steps of training take as long as on a slow device."""
import os
import time

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.classifier = nn.Linear(32, 10)

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ["STEP_S"]))
        return self.classifier(self.features(x))
'''


def federation(way: str, rounds: int, folder: Path) -> float:
    """Run a federation; return its visits a minute after the first round (three visits a round)."""
    run = launch(
        [
            *WAYS[way],
            *("task=digits", "model=slow_device:Net", "engine=superlink", "logger=none", f"rounds={rounds}"),
            *("partition=indices", f"partition.file={folder / 'clients.json'}", "clients_per_round=3"),
            *(f"train.batch={BATCH}", f"train.epochs={EPOCHS}", "evaluate_every=1000", "federation.wait_s=600"),
        ],
        folder / way.partition(",")[0],
    )
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    return float(60 * sum(entry["clients"] for entry in entries) / sum(entry["seconds"] for entry in entries))


def measure(turns: int, rounds: int, step: float) -> dict[str, list[float]]:
    """Return the visits a minute of every federation, by way; `step` is a step's seconds on all devices."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="fedcross-visits-") as place:
                folder = Path(place)
                (folder / "slow_device.py").write_text(NETWORK)
                ends = (0, FAST, 2 * FAST, 2 * FAST + SLOW)
                parts = [list(range(ends[i], ends[i + 1])) for i in range(3)]
                (folder / "clients.json").write_text(json.dumps(parts))
                own = {"FEDCROSS_PATH": str(folder), "STEP_S": str(step), "FEDCROSS_STATE": str(folder / "state")}
                with mock.patch.dict(os.environ, own):
                    found[way].append(federation(way, rounds, folder))
            print(f"  {way}: {found[way][-1]:.1f} visits a minute", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    parser.add_argument("--turns", type=int, default=2, help="federations of each way")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step of training")
    given = parser.parse_args()
    found = measure(given.turns, given.rounds, given.step)
    fast, slow = (given.step * EPOCHS * examples / BATCH for examples in (FAST, SLOW))
    first, second = (median(rates) for rates in found.values())
    lines = ["| method | visits a minute | each federation |", "|---|---|---|"]
    for way, rates in found.items():
        lines.append(f"| `{way}` | {median(rates):.1f} | {', '.join(f'{rate:.1f}' for rate in rates)} |")
    head = f"Three devices train {fast:.0f}, {fast:.0f} and {slow:.0f} s a visit; {given.rounds} rounds of three."
    load = f"Load of the machine: {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores."
    text = "\n\n".join([head, "\n".join(lines), f"Ratio: {second / first:.2f}."])
    print(text)
    if not given.dry:
        write_section("visits", "\n\n".join(["## Visits of devices of different speed", machine(), load, text]))


if __name__ == "__main__":
    main()
