"""Time of FedCross's aggregation on the server, beside a plain loop over pairs and tensors.

fedcross's seconds are ``seconds_aggregation`` of whole rounds in which every client trains one example. The **loop** is
the code without a pool: for every pair of models and every tensor of their ``state_dict`` the products of a cosine,
then a new ``state_dict`` for every model. The **bound** reads and scales the pool once; no aggregation moves less.
"""

from __future__ import annotations

import itertools
import math
import timeit
from collections.abc import Callable
from functools import partial
from statistics import median

import pandas as pd
import torch

from benchmarks.harness import Workload, fedcross_rounds, scratch

ALPHA = 0.99
State = dict[str, torch.Tensor]


def cosine(a: State, b: State) -> float:
    """Return the cosine of two models over all floating-point tensors."""
    pairs = [(x.flatten(), b[name].flatten()) for name, x in a.items() if x.is_floating_point()]
    product = sum(torch.dot(x, y).item() for x, y in pairs)
    squares = [sum(torch.dot(one, one).item() for one in side) for side in zip(*pairs, strict=True)]
    return product / math.sqrt(squares[0] * squares[1])


def plain_loop(models: list[State]) -> list[State]:
    """Return FedCross's next models, lowest similarity, without a pool."""
    similarity = [[math.inf] * len(models) for _ in models]
    for i, j in itertools.combinations(range(len(models)), 2):
        similarity[i][j] = similarity[j][i] = cosine(models[i], models[j])
    partners = [models[min(range(len(models)), key=row.__getitem__)] for row in similarity]
    return [
        {name: (ALPHA * x + (1 - ALPHA) * other[name]).to(x.dtype) for name, x in model.items()}
        for model, other in zip(models, partners, strict=True)
    ]


def read_and_scale(flat: torch.Tensor) -> None:
    """Read and scale the pool once: the bound."""
    flat.sum()
    flat.mul_(1.0)


def timed(action: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of `action`, without the first call."""
    return median(timeit.repeat(action, number=1, repeat=repeats + 1)[1:])


def measure(quick: bool) -> pd.DataFrame:
    """Return a row for each model and pool size."""
    from fedcross.conf.schema import load

    rows = []
    for model, k in itertools.product(
        ("lenet5", "resnet18", "vgg16_bn")[: 1 if quick else 3], (3,) if quick else (5, 10, 20)
    ):
        work = Workload(model, clients=k, examples=2, drawn=k, epochs=1, batch=2)
        with scratch(work) as folder:
            more = ("method=fedcross", "method.alpha=0.99", "engine.workers=1", "evaluate_every=1000")
            settings = work.settings(folder, *more)
            rounds = fedcross_rounds(settings, 2 if quick else 6)
            config = load(settings)
            network, _ = config.network(config.load_data().task)
        start = network.state_dict()
        models = [
            {n: x + torch.rand_like(x) if x.is_floating_point() else x.clone() for n, x in start.items()}
            for _ in range(k)
        ]
        flat = torch.rand(k * sum(x.numel() for x in start.values()))
        ours = float(rounds["seconds_aggregation"].iloc[1:].median())
        bound = timed(partial(read_and_scale, flat), 3)
        loop = timed(partial(plain_loop, models), 1 if quick else 3)
        rows.append({"model": model, "K": k, "pool MB": flat.numel() * 4 / 1e6, "fedcross s": ours})
        rows[-1] |= {"bound s": bound, "over the bound": ours / bound, "loop s": loop, "loop / fedcross": loop / ours}
    return pd.DataFrame(rows)
