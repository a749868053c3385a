"""Time and peak memory of FedCross's aggregation on the server, beside a plain loop and the memory bandwidth.

::

    python -m benchmarks.aggregation                  # every case that fits this machine; writes docs/performance.md
    python -m benchmarks.aggregation --quick --dry    # two small models, a few seconds, prints only
    python -m benchmarks.aggregation --k 10 --models vgg16_bn --dry

Each case runs in a new process, so that its peak memory is not that of another case. One repetition measures, one
after the other on the same buffer: reading it once, scaling it in place once, the Gram matrix with lowest-similarity
selection, mixing, and the fused in-order pass. The **bound** is reading plus scaling: no aggregation can move fewer
bytes. The **loop** is the code without a pool: for every pair of models and every tensor of their ``state_dict`` the
products of a cosine, then a new ``state_dict`` for every model.

Repetitions during which other processes used the CPU do not count if there are enough quiet ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import machine, write_section
from benchmarks.shapes import Shapes, float_values, shapes

MODELS = {"lenet5": "62k", "resnet18": "11M", "vgg16_bn": "34M", "vgg16": "138M"}
POOLS = (5, 10, 20, 50)
ALPHA = 0.99
QUIET = 0.1  # a repetition is quiet if others used less than this share of all cores
SHARE_OF_MEMORY = 0.85  # largest share of the free memory
Times = dict[str, float]


# ---- one case, in its own process --------------------------------------------------------------------------------


def pool_case(name: str, k: int, repeats: int, patience: float) -> dict[str, Any]:
    """Measure the bound and the pool on one buffer."""
    import torch

    from fedcross.strategies.pool.layout import Layout
    from fedcross.strategies.pool.mixing import cross
    from fedcross.strategies.pool.pool import Pool
    from fedcross.strategies.pool.selection import Question, in_order, lowest_similarity
    from fedcross.strategies.pool.similarity import cosine

    def layout(model: Shapes) -> Layout:
        return Layout.of({key: np.broadcast_to(np.zeros((), dtype), shape) for key, (shape, dtype) in model.items()})

    everybody = range(k)

    def aggregate(pool: Pool) -> tuple[float, float]:
        start = time.perf_counter()
        partners = lowest_similarity(Question(k, 1, similarity=cosine(pool.gram())))
        middle = time.perf_counter()
        pool.mix(cross(k, everybody, partners, ALPHA))
        return middle - start, time.perf_counter() - middle

    warm = Pool(layout({"w": ((2**24 // k,), "float32")}), k)  # large enough for the compiled loops
    warm.rows[...] = 1.0
    aggregate(warm)
    warm.mix_with_gram(cross(k, everybody, in_order(Question(k, 1)), ALPHA))
    del warm
    model = layout(shapes(name))
    before = memory_now()
    pool = Pool(model, k)
    flat = torch.from_numpy(pool.rows).view(-1)
    generator = torch.Generator().manual_seed(0)
    for row in torch.from_numpy(pool.rows):
        row.uniform_(-1, 1, generator=generator)
    in_turn = cross(k, everybody, in_order(Question(k, 1)), ALPHA)

    def once() -> Times:
        times = {"read": seconds(flat.sum), "scale": seconds(lambda: flat.mul_(1.0))}
        times["gram"], times["mixing"] = aggregate(pool)
        times["fused"] = seconds(lambda: pool.mix_with_gram(in_turn))
        times["bound"] = times["read"] + times["scale"]
        times["total"] = times["gram"] + times["mixing"]
        return times

    return measured(once, repeats, patience) | {"peak": max(status("VmHWM") - before, 0)}


def loop_case(name: str, k: int, repeats: int, patience: float) -> dict[str, Any]:
    """Measure the plain loop over pairs and tensors."""
    import torch

    spec = shapes(name)
    before = memory_now()
    generator = torch.Generator().manual_seed(0)
    models: list[dict[str, torch.Tensor]] = []
    for _ in range(k):
        model = {}
        for key, (shape, dtype) in spec.items():
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            model[key] = tensor.uniform_(-1, 1, generator=generator) if dtype == "float32" else tensor
        models.append(model)

    def cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        product = square_a = square_b = 0.0
        for key, x in a.items():
            if x.is_floating_point():
                x, y = x.flatten(), b[key].flatten()
                product += torch.dot(x, y).item()
                square_a += torch.dot(x, x).item()
                square_b += torch.dot(y, y).item()
        return product / math.sqrt(square_a * square_b)

    def aggregate() -> None:
        nonlocal models
        similarity = [[math.inf] * k for _ in range(k)]
        for i in range(k):
            for j in range(i):
                similarity[i][j] = similarity[j][i] = cosine(models[i], models[j])
        mixed = []
        for i in range(k):
            other = models[min(range(k), key=similarity[i].__getitem__)]
            pairs = ((key, ALPHA * x + (1 - ALPHA) * other[key]) for key, x in models[i].items())
            mixed.append({key: value.to(models[i][key].dtype) for key, value in pairs})
        models = mixed

    return measured(lambda: {"total": seconds(aggregate)}, repeats, patience) | {
        "peak": max(status("VmHWM") - before, 0)
    }


def seconds(action: Callable[[], object]) -> float:
    """Return the wall-clock seconds of `action`."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measured(once: Callable[[], Times], repeats: int, patience: float) -> dict[str, Any]:
    """Repeat until there are enough quiet repetitions or `patience` seconds have passed; return medians."""
    kept: list[tuple[float, Times]] = []
    deadline = time.perf_counter() + patience
    if patience > 0:
        once()  # the first repetition allocates memory and starts threads
    while not kept or (sum(share < QUIET for share, _ in kept) < repeats and time.perf_counter() < deadline):
        busy, own, wall = cpu_seconds(), sum(os.times()[:2]), time.perf_counter()
        times = once()
        wall = (time.perf_counter() - wall) * (os.cpu_count() or 1)
        kept.append((max(0.0, cpu_seconds() - busy - (sum(os.times()[:2]) - own)) / wall, times))
    quiet = [pair for pair in kept if pair[0] < QUIET]
    used = quiet if len(quiet) >= min(3, repeats) else kept
    spread = [times["total"] for _, times in used]
    return {
        "median": {key: median(times[key] for _, times in used) for key in used[0][1]},
        "low": min(spread),
        "high": max(spread),
        "repetitions": len(used),
        "foreign": median(share for share, _ in used),
    }


def status(key: str) -> int:
    """Return a memory figure of this process in bytes (``VmRSS``, ``VmHWM``)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def memory_now() -> int:
    """Return the memory that this process uses now, and reset its peak; what it gives back later lies below that."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes on this machine, summed over cores."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# ---- all cases ---------------------------------------------------------------------------------------------------


def free_bytes() -> int:
    """Return the memory that is free for a new process."""
    line = next(s for s in Path("/proc/meminfo").read_text().splitlines() if s.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def run_case(kind: str, name: str, k: int, args: argparse.Namespace) -> dict[str, Any] | str:
    """Run a case in a new process; return its figures, or the reason for leaving it out."""
    model = shapes(name)
    largest = max(math.prod(shape) for shape, _ in model.values())
    d = float_values(model)
    need = 4 * (k * d + (largest if kind == "pool" else k * d + 3 * largest)) + 2**29
    if need > SHARE_OF_MEMORY * free_bytes():
        return f"needs {need / 2**30:.1f} GiB, {free_bytes() / 2**30:.1f} GiB are free"
    command = [sys.executable, "-m", "benchmarks.aggregation", "--case", kind, "--k", str(k), "--models", name]
    command += ["--repeats", str(args.repeats), "--patience", str(args.patience)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed with exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def row(name: str, k: int, args: argparse.Namespace) -> str:
    """Run one row of the table."""
    pool = run_case("pool", name, k, args)
    head = f"| {k} | {MODELS[name]} ({name}) |"
    size = 4 * k * float_values(shapes(name))
    if isinstance(pool, str):
        return f"{head} {size / 1e6:,.0f} | left out: {pool} " + "| " * 9 + "|"
    loop = run_case("loop", name, k, args) if args.loop else "not asked for"
    t = pool["median"]
    cells = [
        f"{size / 1e6:,.1f}",
        *(f"{t[key]:.4f}" for key in ("bound", "gram", "mixing")),
        f"{t['total']:.4f} ({pool['low']:.4f}-{pool['high']:.4f}, {pool['repetitions']})",
        f"**{t['total'] / t['bound']:.2f}**",
        f"{t['fused']:.4f}",
        f"{pool['peak'] / size:.2f}",
    ]
    if isinstance(loop, str):
        cells += [f"left out: {loop}", ""]
    else:
        ratio = loop["median"]["total"] / t["total"]
        cells += [f"{loop['median']['total']:.3f} (**{ratio:.1f}**)", f"{loop['peak'] / size:.2f}"]
    foreign = max([pool["foreign"]] + ([] if isinstance(loop, str) else [loop["foreign"]]))
    return f"{head} {' | '.join(cells)} | {foreign:.0%} |"


HEADER = (
    "| K | d | pool, MB | bound, s | Gram + selection, s | mixing, s | both, s (range, runs) | over the bound "
    "| fused in-order, s | peak / pool | loop, s (over both) | loop's peak / pool | others' CPU |"
)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    line.add_argument("--k", type=int, nargs="+", default=list(POOLS), help="sizes of the pool")
    line.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    line.add_argument("--repeats", type=int, default=9, help="quiet repetitions per case")
    line.add_argument("--patience", type=float, default=30, help="seconds per case to wait for them")
    line.add_argument("--no-loop", dest="loop", action="store_false", help="leave the plain loop out")
    line.add_argument("--quick", action="store_true", help="lenet5 and resnet18, K = 5 and 10, 3 repetitions")
    line.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    line.add_argument("--case", choices=("pool", "loop"), help=argparse.SUPPRESS)
    return line


def main() -> None:
    """Run what the command line asks for, print the table and write it into docs/performance.md."""
    args = parser().parse_args()
    if args.case:
        case = pool_case if args.case == "pool" else loop_case
        print(json.dumps(case(args.models[0], args.k[0], args.repeats, args.patience)))
        return
    if args.quick:
        args.k, args.models, args.repeats, args.patience = [5, 10], ["lenet5", "resnet18"], 3, 5.0
    import torch

    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    about = (
        f"`python -m benchmarks.aggregation {' '.join(sys.argv[1:])}`. {machine()} {torch.get_num_threads()} threads."
    )
    print("\n".join([about, "", *lines]), flush=True)
    for name in args.models:
        for k in args.k:
            lines.append(row(name, k, args))
            print(lines[-1], flush=True)
    if not args.dry:
        write_section("aggregation", "\n".join([about, "", *lines]))


if __name__ == "__main__":
    main()
