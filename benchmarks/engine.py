"""A round of local training: the local engine against hand-written loops, interleaved in one run.

::

    python -m benchmarks.engine                        # both workloads, writes docs/performance.md
    python -m benchmarks.engine --workload lenet5 --epochs 1 --repeats 3 --dry

The reference is a textbook loop in two processes of one thread each. The rounds of fedcross are
complete, with messages, guard, aggregation, evaluation, metrics and checkpoint; the loops only train and average.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common import (
    WORKLOADS,
    Cell,
    Ours,
    Workload,
    images,
    interleaved,
    machine,
    metered,
    overrides,
    table,
    write_section,
)
from benchmarks.loops import Loop

REFERENCE = "textbook loop, two processes (reference)"


def compare(work: Workload, repeats: int, alone: bool) -> str:
    """Return the table of one workload."""
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as name:
        folder = Path(name)
        os.environ.setdefault("FEDCROSS_STATE", str(folder / "state"))
        os.environ.setdefault("FEDCROSS_CACHE", str(folder / "cache"))
        images(work, folder)
        n = work.drawn * work.examples
        x, y = torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))
        loops = {REFERENCE: Loop(work, x, y, 2), "tuned loop, two processes": Loop(work, x, y, 2, tune=True)}
        if alone:
            loops["textbook loop, one process"] = Loop(work, x, y, 1)
        ours = {
            "fedcross, two workers": Ours(overrides(work, folder, folder / "f32"), 2),
            "fedcross, two workers, bfloat16": Ours(
                overrides(work, folder, folder / "bf16", "train.precision=bfloat16"), 2
            ),
        }
        runners: dict[str, Callable[[], Cell]] = {who: loop.round for who, loop in loops.items()}
        runners |= {who: rounds_of(run) for who, run in ours.items()}
        try:
            return table(interleaved(runners, repeats), REFERENCE)
        finally:
            for loop in loops.values():
                loop.close()
            for run in ours.values():
                run.close()


def rounds_of(run: Ours) -> Callable[[], Cell]:
    """Return a function that does and meters the next round of `run`."""

    def once() -> Cell:
        with metered(run.pids) as cell:
            run.round()
        return cell

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="also the textbook loop in one process")
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = []
    for name in WORKLOADS if given.workload == "all" else [given.workload]:
        work = replace(WORKLOADS[name], epochs=given.epochs)
        head = f"**{work.model}**, {work.clients} clients x {work.examples}, K={work.drawn}, E={work.epochs}"
        parts.append(f"{head}, medians of {given.repeats} turns:\n\n{compare(work, given.repeats, given.alone)}")
        print(parts[-1], flush=True)
    if not given.dry:
        write_section(f"engine {given.workload}", "\n\n".join(["## A round of training", machine(), *parts]))


if __name__ == "__main__":
    main()
