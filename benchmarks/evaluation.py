"""Time of scoring test images on one core, by how many are scored at a time.

::

    python -m benchmarks.evaluation                          # writes docs/performance.md
    python -m benchmarks.evaluation --models lenet5 --dry    # prints only

Sizes are measured in turn on the same images, so that a noisy moment hits all alike; a time is the best of `--repeats`.
The scores of all sizes are compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import machine, write_section
from fedcross.client.device import CACHED
from fedcross.tasks.models import create
from fedcross.tasks.scoring import predictions

#: Examples at a time; the first is what the others are compared with.
BATCHES = (1000, 500, 200, CACHED, 50)
MODELS = ("lenet5", "resnet20", "vgg16_bn", "resnet18")
HEADER = "| model | " + " | ".join(f"{batch} at a time, s" for batch in BATCHES) + f" | 1000 : {CACHED} | same bits |"


def times(name: str, images: int, repeats: int) -> tuple[dict[int, float], bool]:
    """Return batch size -> seconds for `images` images of network `name`, and whether all scores are the same."""
    task: Any = SimpleNamespace(shape=(3, 32, 32), classes=10, vocabulary=0)
    network = create(name, {}, task, 1).eval()
    inputs = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    best, scores = dict.fromkeys(BATCHES, float("inf")), []
    for _ in range(repeats):
        for batch in BATCHES:
            start = time.perf_counter()
            scores.append(predictions(network, inputs, batch))
            best[batch] = min(best[batch], time.perf_counter() - start)
    return best, all(torch.equal(one, scores[0]) for one in scores)


def row(name: str, images: int, repeats: int) -> str:
    """Return the line of the table for network `name`."""
    best, same = times(name, images, repeats)
    cells = " | ".join(f"{best[batch]:.2f}" for batch in BATCHES)
    return f"| {name} | {cells} | **{best[BATCHES[0]] / best[CACHED]:.1f}** | {'yes' if same else 'no'} |"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    line.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    line.add_argument("--images", type=int, default=2000)
    line.add_argument("--repeats", type=int, default=3)
    line.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    return line


def main() -> None:
    """Run what the command line asks for, print the table and write it into docs/performance.md."""
    args = parser().parse_args()
    torch.set_num_threads(1)
    command = " ".join(["python -m benchmarks.evaluation", *sys.argv[1:]])
    about = f"`{command}`: {args.images} random images of 3x32x32, one thread, best of {args.repeats}. {machine()}"
    lines = [about, "", HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    lines += [row(name, args.images, args.repeats) for name in args.models]
    print("\n".join(lines))
    if not args.dry:
        write_section("evaluation", "\n".join(lines))


if __name__ == "__main__":
    main()
