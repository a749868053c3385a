"""CPU time and page faults of a training step, with and without keeping the memory that steps free.

::

    python -m benchmarks.freed_memory                            # writes docs/performance.md
    python -m benchmarks.freed_memory --models lenet5 --dry      # prints only

Each turn is a process of its own, with and without in turn; a figure is the median over the turns. One thread, batches
of 50 images of 3x32x32, in the trainer's memory layout.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.common import machine, write_section

BATCH = 50
#: Model -> steps that are measured, after three that are not.
MODELS = {"lenet5": 300, "resnet20": 30, "vgg16_bn": 8, "resnet18": 5}
HEADER = "| model | CPU ms a step before | after | after : before | page faults a step before | after |"


def case(name: str, keep: bool) -> dict[str, float]:
    """Return the CPU seconds and the page faults of a step of network `name` in this process."""
    import torch
    from torch.nn import functional

    from fedcross.client.flat_model import ModuleNet
    from fedcross.client.freed_memory import keep_freed_memory
    from fedcross.tasks.models import create

    if keep and not keep_freed_memory():
        raise SystemExit("this machine's C library has no such setting, or the environment has its own")
    torch.set_num_threads(1)
    task: Any = SimpleNamespace(shape=(3, 32, 32), classes=10, vocabulary=0)
    net = ModuleNet(create(name, {}, task, 1), torch.device("cpu"))
    x, y = net.arrange(torch.randn(BATCH, 3, 32, 32)), torch.randint(0, 10, (BATCH,))

    def steps(count: int) -> None:
        for _ in range(count):
            net.gradient.zero_()
            functional.cross_entropy(net.logits(net.params, net.buffers, x), y).backward()  # type: ignore[no-untyped-call]
            net.flat.data.sub_(net.gradient, alpha=0.01)

    steps(3)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    steps(MODELS[name])
    seconds = time.process_time() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"seconds": seconds / MODELS[name], "faults": faults / MODELS[name]}


def row(name: str, turns: int) -> str:
    """Return the line of the table for network `name`."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _ in range(turns):
        for setting, results in found.items():
            line = [sys.executable, "-m", "benchmarks.freed_memory", "--case", setting, "--models", name]
            done = subprocess.run(line, check=True, capture_output=True, text=True, env=dict(os.environ))
            results.append(json.loads(done.stdout))
    off, on = ({key: median(one[key] for one in results) for key in results[0]} for results in found.values())
    times = f"{1000 * off['seconds']:.1f} | {1000 * on['seconds']:.1f} | **{on['seconds'] / off['seconds']:.2f}**"
    return f"| {name} | {times} | {off['faults']:.0f} | {on['faults']:.0f} |"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    line.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    line.add_argument("--turns", type=int, default=5)
    line.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    line.add_argument("--case", choices=("off", "on"), help=argparse.SUPPRESS)
    return line


def main() -> None:
    """Run what the command line asks for, print the table and write it into docs/performance.md."""
    args = parser().parse_args()
    if args.case:
        print(json.dumps(case(args.models[0], args.case == "on")))
        return
    command = " ".join(["python -m benchmarks.freed_memory", *sys.argv[1:]])
    lines = [f"`{command}`, median of {args.turns} turns. {machine()}", "", HEADER]
    lines += ["|" + "---|" * (HEADER.count("|") - 1), *(row(name, args.turns) for name in args.models)]
    print("\n".join(lines))
    if not args.dry:
        write_section("freed memory", "\n".join(lines))


if __name__ == "__main__":
    main()
