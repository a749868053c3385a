"""Time of one local epoch of FedFusion's operators against FedAvg's, interleaved in one process, medians.

``python -m benchmarks.fusion [--examples 2000] [--epochs 5] [--repeats 5]``: a visit is E epochs, and computing the
global features that it caches is part of its time. Times are CPU seconds of one thread, which other
processes hardly disturb.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Objective, Visit
from fedcross.strategies.round.registry import method_class
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models import create

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "single": ("fedfusion", {"operator": "single"}),
    "multi": ("fedfusion", {"operator": "multi"}),
    "conv": ("fedfusion", {"operator": "conv"}),
    "conv, no cache": ("fedfusion", {"operator": "conv", "cache_mib": 0.0}),
}
SHAPES = {"fedfusion_mnist": (1, 28, 28), "fedfusion_cifar": (3, 32, 32)}


def prepared(model: str, case: str, examples: int) -> tuple[ModuleNet, Objective, Visit]:
    """Return network, objective and visit of one case on random images."""
    name, values = CASES[case]
    method = method_class(name)
    params = method.Params(**values)
    nothing = Examples(np.zeros((1, *SHAPES[model]), np.uint8), np.zeros(1, np.int64))
    task = Task("random", nothing, nothing, 10, SHAPES[model], lambda raw: torch.from_numpy(np.array(raw)).float())
    net = ModuleNet(method.network(create(model, {}, task, 1), params, 1), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, *SHAPES[model], generator=generator)
    y = torch.randint(10, (examples,), generator=generator)
    visit = Visit(
        net=net,
        params={n: p.detach().clone() for n, p in net.params.items()},
        buffers={n: b.clone() for n, b in net.buffers.items()},
        extras={}, config={}, state={}, inputs=Inputs(x), y=y, client=0, round=1, rounds=1, seed=1, classes=10, lr=2e-3,
    )  # fmt: skip
    return net, method.Objective(params), visit


def main() -> None:
    """Print the medians as one JSON object."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("--model", choices=tuple(SHAPES), default="fedfusion_mnist")
    line.add_argument("--examples", type=int, default=2000)
    line.add_argument("--epochs", type=int, default=5)
    line.add_argument("--repeats", type=int, default=5)
    options = line.parse_args()
    torch.set_num_threads(1)
    settings = Train(lr=2e-3, momentum=0.9, weight_decay=5e-4, epochs=options.epochs, batch=64)
    cases = {case: prepared(options.model, case, options.examples) for case in CASES}
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for repeat in range(options.repeats + 1):
        for case, (net, objective, visit) in cases.items():
            started = time.process_time()
            train(net, objective, visit, objective.prepare(visit), settings)
            if repeat:  # the first visit warms up
                seconds[case].append((time.process_time() - started) / options.epochs)
    medians = {case: statistics.median(values) for case, values in seconds.items()}
    spread = {case: [round(min(v), 4), round(max(v), 4)] for case, v in seconds.items()}
    ratios = {case: round(value / medians["fedavg"], 3) for case, value in medians.items()}
    used = {"model": options.model, "examples": options.examples, "epochs": options.epochs}
    result = {**used, "seconds_per_epoch": {c: round(m, 4) for c, m in medians.items()}, "range": spread}
    print(json.dumps({**result, "to_fedavg": ratios, "torch": torch.__version__}, indent=2))


if __name__ == "__main__":
    main()
