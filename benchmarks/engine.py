"""A round of local training: the local engine against a textbook loop in two processes, in turns.

The rounds of fedcross are complete, with messages, checks, aggregation, evaluation, metrics and checkpoint; the loops
only train and average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Workload, in_turns, scratch, seconds

State = dict[str, Tensor]
REFERENCE = "textbook loop, two processes"


def network(name: str) -> nn.Module:
    """Return the CNN of a workload as textbooks have it."""
    widths, hidden = {"lenet5": ((6, 16), (120, 84)), "cnn_w": ((32, 64), (512,))}[name]
    layers: list[nn.Module] = []
    for before, width in zip((3, widths[0]), widths, strict=True):
        layers += [nn.Conv2d(before, width, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    size = widths[1] * 25
    for width in hidden:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, 10))


def train(work: Workload, state: State, x: Tensor, y: Tensor, tuned: bool) -> State:
    """Train one client by plain torch; `tuned`: channels last and torch's fused SGD."""
    torch.set_num_threads(1)
    model = network(work.model)
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum, fused=tuned)
    x = x.contiguous(memory_format=torch.channels_last) if tuned else x
    for _ in range(work.epochs):
        for part in torch.split(torch.randperm(len(y)), work.batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def loop(work: Workload, rounds: int, tuned: bool) -> Callable[[], float]:
    """Return a call that does `rounds` rounds of FedAvg in two processes and returns the median seconds of one."""

    def block() -> float:
        x, y = torch.randn(work.drawn, work.examples, 3, 32, 32), torch.randint(0, 10, (work.drawn, work.examples))
        state, times = network(work.model).state_dict(), []
        with get_context("fork").Pool(2) as pool:
            for _ in range(rounds + 1):
                start = time.perf_counter()
                jobs = [(work, state, x[i], y[i], tuned) for i in range(work.drawn)]
                states = pool.starmap(train, jobs, chunksize=1)
                state = {name: torch.stack([one[name] for one in states]).mean(0) for name in state}
                times.append(time.perf_counter() - start)
        return float(pd.Series(times[1:]).median())

    return block


def measure(quick: bool) -> pd.DataFrame:
    """Return the table of both workloads."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    works = [Workload(clients=10, examples=50, drawn=2, epochs=1)] if quick else [Workload(), Workload("cnn_w")]
    rounds, turns, parts = (1, 1) if quick else (3, 3), None, []
    for work in works:
        with scratch(work) as folder:
            contestants = {
                REFERENCE: loop(work, rounds[0], tuned=False),
                "tuned loop, two processes": loop(work, rounds[0], tuned=True),
                "fedcross, two workers": seconds(work.settings(folder, "engine.workers=2"), rounds[0]),
                "fedcross, bfloat16": seconds(
                    work.settings(folder, "engine.workers=2", "train.precision=bfloat16"), rounds[0]
                ),
            }
            parts.append(in_turns(contestants, turns or rounds[1], REFERENCE).assign(model=work.model))
    return pd.concat(parts)
