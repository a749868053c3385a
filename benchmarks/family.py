"""Time of the pool methods' aggregation on the server, beside FedCross's and the memory bandwidth.

::

    python -m benchmarks.family                            # K = 10, VGG-16 (34M); writes docs/performance.md
    python -m benchmarks.family --models lenet5 --dry      # prints only

Each case runs in a new process. One repetition measures everything in turn on the same buffer, so that a noisy moment
hits all alike; the **bound** is that of :mod:`benchmarks.aggregation`: reading the pool once and scaling it in place
once. Every time is a method's own work after the uploads are written, without diagnostics.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np

from benchmarks.aggregation import ALPHA, MODELS, Times, measured, memory_now, seconds, status
from benchmarks.common import machine, write_section
from benchmarks.shapes import Shapes, shapes
from fedcross.strategies.wire.protocol import Upload

#: FedFan that corrects no upload and shrinks nothing (``method.memory_mb=0 method.shrink=0``).
BARE = "fedfan, uploads not corrected"
METHODS = (
    "fedcross in order",
    "fedcross by similarity",
    "fedmr",
    "fedmut",
    "masterpull",
    "daisychain",
    BARE,
    "fedfan",
)


def case(name: str, k: int, repeats: int, patience: float) -> dict[str, Any]:
    """Measure the bound and every method on one pool of `k` models of network `name`."""
    import torch

    from fedcross.strategies.fedcross import FedCross
    from fedcross.strategies.parts.control_variates import ControlVariates
    from fedcross.strategies.pool.passes import shrink
    from fedcross.strategies.pool.selection import find_selection
    from fedcross.strategies.round.registry import method_class
    from fedcross.strategies.wire.protocol import Round

    model = {key: np.broadcast_to(np.zeros((), dtype), shape) for key, (shape, dtype) in shapes(name).items()}
    settings: dict[str, Any] = {"clients_per_round": k, "diagnostics_every": 0}
    cross = FedCross(alpha=ALPHA, selection="in_order", **settings)
    cross.begin(model, trained(shapes(name)))
    similar = FedCross(alpha=ALPHA, selection="lowest_similarity", **settings)
    others: dict[str, Any] = {one: method_class(one)(**settings) for one in METHODS[2:-2]}
    fan: Any = method_class("fedfan")(**settings, shrink=0)
    others[BARE] = fan
    before = memory_now()
    for method in others.values():
        method.pool = cross.pool
    similar.pool, similar._selection = cross.pool, find_selection("lowest_similarity")
    similar._columns = cross.pool.layout.columns("parameters")
    others["fedmut"].mean, others["fedmut"].counters = cross.pool.mean_row([0])
    fan.mean, fan.counters = cross.pool.mean_row([0])
    fan.steps, fan.average = np.stack([cross.pool.mean_row([1])[0]] * 2), cross.pool.mean_row([1])[0]
    fan.visit, fan.origin, fan._spare, fan._newest = 1.0, cross.pool.mean_row([1])[0], np.empty_like(fan.mean), 0
    fan.parameter_names, fan.variates = cross.parameter_names, ControlVariates(cross.pool.layout, 2**40)
    uploads = [Upload(slot, slot, cross.pool.layout.views(fan.origin, fan.counters), {}, 1, {}) for slot in range(k)]
    generator = torch.Generator().manual_seed(0)
    for row in torch.from_numpy(cross.pool.rows):
        row.uniform_(-1, 1, generator=generator)
    flat = torch.from_numpy(cross.pool.rows).view(-1)
    everybody = list(range(k))

    def once() -> Times:
        current = Round(1, 0, tuple(everybody), 0)
        times = {"read": seconds(flat.sum), "scale": seconds(lambda: flat.mul_(1.0))}
        times["fedcross in order"] = seconds(partial(crossed, cross, current, everybody))
        times["fedcross by similarity"] = seconds(partial(crossed, similar, current, everybody))
        for one, method in others.items():
            times[one] = seconds(partial(method.recombine, current, everybody))
        times[BARE] += seconds(lambda: [fan._changed(upload) for upload in uploads])
        times["fedfan"] = times[BARE] + seconds(lambda: fan.variates.correct(uploads, cross.pool.model))
        times["fedfan"] += seconds(lambda: shrink(cross.pool, fan._trained(), 0.002))
        times["bound"] = times["read"] + times["scale"]
        times["total"] = times["fedmr"]
        return times

    return measured(once, repeats, patience) | {"peak": max(status("VmHWM") - before, 0)}


def crossed(method: Any, current: Any, members: list[int]) -> None:
    """Mix the pool as FedCross does."""
    method.pool.mix(method._mixing(current, members)[0])


def trained(model: Shapes) -> set[str]:
    """Return the names of the entries that are no statistics of a batch normalisation."""
    return {key for key, (_, dtype) in model.items() if dtype == "float32" and "running" not in key}


def rows(name: str, k: int, args: argparse.Namespace) -> list[str]:
    """Run one case in a new process and return its rows of the table."""
    command = [sys.executable, "-m", "benchmarks.family", "--case", "--k", str(k), "--models", name]
    command += ["--repeats", str(args.repeats), "--patience", str(args.patience)]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    times, foreign = done["median"], done["foreign"]
    head = f"| {k} | {MODELS[name]} ({name})"
    lines = [f"{head} | bound | {times['bound']:.3f} | 1 | {done['repetitions']} | {foreign:.0%} |"]
    return lines + [
        f"{head} | {one} | {times[one]:.3f} | **{times[one] / times['bound']:.2f}** | {done['repetitions']} "
        f"| {foreign:.0%} |"
        for one in METHODS
    ]


HEADER = "| K | d | method | seconds | over the bound | runs | others' CPU |"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    line.add_argument("--k", type=int, nargs="+", default=[10], help="sizes of the pool")
    line.add_argument("--models", nargs="+", choices=MODELS, default=["vgg16_bn"])
    line.add_argument("--repeats", type=int, default=9, help="quiet repetitions per case")
    line.add_argument("--patience", type=float, default=60, help="seconds per case to wait for them")
    line.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    line.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    return line


def main() -> None:
    """Run what the command line asks for, print the table and write it into docs/performance.md."""
    args = parser().parse_args()
    if args.case:
        print(json.dumps(case(args.models[0], args.k[0], args.repeats, args.patience)))
        return
    import torch

    about = f"`python -m benchmarks.family {' '.join(sys.argv[1:])}`. {machine()} {torch.get_num_threads()} threads."
    lines = [about, "", HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for name in args.models:
        for k in args.k:
            lines += rows(name, k, args)
    print("\n".join(lines))
    if not args.dry:
        write_section("family", "\n".join(lines))


if __name__ == "__main__":
    main()
