"""Weights after one epoch: the device against the CPU, in each precision, and the device against itself.

And whether it prepares every value of a byte as the CPU does.
"""

from __future__ import annotations

import os
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.place import NORMALISE, Place, network, settings, visit
from benchmarks.gpu.report import Found, Lines
from benchmarks.gpu.rounds import LOCAL, farthest, ran
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective
from fedcross.tasks.inputs import Inputs, Prepare

MODELS = ("lenet5", "resnet20", "lstm")
#: For a model that takes a CPU long.
EXAMPLES = {"vgg_femnist": 110}


def measure(place: Place, line: Lines) -> None:
    """Write a line for the bytes, and one for each model in each precision."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for `deterministic`; read when cuBLAS starts
    line("bytes prepared as on the CPU", partial(_same_bytes, place))
    for model in MODELS[:1] if place.tiny else MODELS:
        for precision in ("float32", "tf32", "bfloat16"):
            line(f"{model} {precision}", partial(_compared, place, model, precision))
        line(f"{model} float32, deterministic", partial(_compared, place, model, "float32", deterministic=True))
    if not place.tiny:  # the two for which torch has no algorithm that repeats itself
        pooling = partial(_compared, place, "vgg_femnist", "float32", deterministic=True)
        line("vgg_femnist float32, deterministic", pooling)
        line("fedgen float32, deterministic", partial(method_twice, place, "fedgen"))


def method_twice(place: Place, method: str) -> Found:
    """Run `method` twice with ``train.deterministic``, and on the CPU."""
    engine = [*LOCAL, "train.deterministic=true"]
    one, two = (ran(method, engine, str(place.device))[0] for _ in range(2))
    return {"from CPU": farthest(ran(method, LOCAL, "cpu")[0], one), "same twice": farthest(one, two) == 0}


def _same_bytes(place: Place) -> bool:
    raw = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 3, 1, 1)
    held = Inputs(torch.from_numpy(raw).to(place.device), Prepare(NORMALISE, 4, place.device))
    return bool(torch.equal(held[:].cpu(), NORMALISE(raw)))


def _compared(place: Place, model: str, precision: str, *, deterministic: bool = False) -> Found:
    one, two = (trained(place, model, precision, deterministic=deterministic) for _ in range(2))
    apart = float((one - _exact(model, place.tiny)).abs().max())
    return {"from CPU": apart, "same twice": bool(torch.equal(one, two))}


@cache
def _exact(model: str, tiny: bool) -> Tensor:
    return trained(Place(torch.device("cpu"), tiny), model, "float32")


def trained(place: Place, model: str, precision: str, *, deterministic: bool = False) -> Tensor:
    """Return the weights of `model` after an epoch, on the CPU."""
    net = network(place, model, precision, deterministic=deterministic)
    one = visit(net, 0, 60 if place.tiny else EXAMPLES.get(model, 500), model)
    return train(net, Objective(Settings()), one, {}, settings(precision=precision)).flat.detach().cpu().clone()
