"""The time of one training step of LeNet-5 by operation: a textbook step and the step of fedcross.

::

    python -m benchmarks.step            # writes docs/performance.md
    python -m benchmarks.step --dry

One process, one thread, batch of 50. Times are torch's profiler's own time of each operation, median over turns that
alternate between the two; the step's whole time is measured without the profiler, which costs some of its own.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import machine, write_section
from benchmarks.loops import network
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import step
from fedcross.conf.schema import Train
from fedcross.tasks.models import pooling
from fedcross.tasks.models.lenet5 import Params, build

BATCH, STEPS, TURNS = 50, 40, 7
LR, MOMENTUM = 0.01, 0.5
#: Row -> prefixes of the operations' names. Other operations count as the rest.
ROWS = {
    "convolutions, backward": ("aten::convolution_backward", "_BothBackward"),
    "convolutions, forward": ("aten::mkldnn_convolution", "aten::convolution", "aten::_convolution", "aten::conv2d"),
    "max-pool, forward": ("aten::max_pool2d", "_Pool", "_Both"),
    "max-pool, backward": ("aten::max_pool2d_with_indices_backward", "_PoolBackward"),
    "fully connected layers": ("aten::mm", "aten::addmm", "aten::linear"),
    "ReLU": ("aten::relu", "aten::clamp_min", "aten::threshold_backward"),
}
REST = "loss, optimiser, zeroing, copies, autograd"


def row_of(name: str) -> str:
    """Return the row of an operation, by the longest matching prefix."""
    fits = [(len(start), row) for row, starts in ROWS.items() for start in starts if name.startswith(start)]
    return max(fits)[1] if fits else REST


def textbook(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """Return a step written without a framework: channels first, ReLU before the pool, torch's SGD."""
    model = network("lenet5", pool_first=False)
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def one() -> None:
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return one


def ours(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """Return the step of :mod:`client.trainer` with FedAvg's objective."""
    task: Any = SimpleNamespace(name="images", shape=(3, 32, 32), classes=10)
    net = ModuleNet(build(Params(), task), torch.device("cpu"))
    settings = Train(epochs=1, batch=BATCH, lr=LR, momentum=MOMENTUM)
    momentum, inputs = torch.zeros_like(net.flat), net.arrange(x)

    def one() -> None:
        net.gradient.zero_()
        functional.cross_entropy(net.logits(net.params, net.buffers, inputs), y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            step(net.flat, net.gradient, momentum, LR, settings)

    return one


def timed(one: Callable[[], Any]) -> float:
    """Return milliseconds per step."""
    started = time.perf_counter()
    for _ in range(STEPS):
        one()
    return (time.perf_counter() - started) / STEPS * 1e3


def profiled(one: Callable[[], Any]) -> dict[str, float]:
    """Return milliseconds per step for each row."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            one()
    rows: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        rows[row_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
    return rows


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    pooling.TRIAL = 0  # the compiled loop from the first step, as after the first seconds of a run
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    steps = {"before": textbook(x, y), "after": ours(x, y)}
    for one in steps.values():
        timed(one)
    whole: dict[str, list[float]] = defaultdict(list)
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(TURNS):
        for name, one in steps.items():
            whole[name].append(timed(one))
            rows[name].append(profiled(one))
    lines = ["| part of a step | textbook, ms | ours, ms |", "|---|---|---|"]
    for row in (*ROWS, REST):
        before, after = (median(turn[row] for turn in rows[name]) for name in steps)
        lines.append(f"| {row} | {before:.2f} | {after:.2f} |")
    before, after = (median(whole[name]) for name in steps)
    ratio = median(b / a for a, b in zip(whole["before"], whole["after"]))
    lines.append(f"| **step, without the profiler** | {before:.2f} | {after:.2f} ({ratio:.2f}) |")
    text = "\n".join(["## A step of LeNet-5, before and after", "", machine(), "", *lines])
    print(text)
    if not chosen.dry:
        write_section("step", text)


if __name__ == "__main__":
    main()
