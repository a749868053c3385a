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
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective
from fedcross.tasks.inputs import Inputs, Prepare

MODELS = ("lenet5", "resnet20", "lstm")


def measure(place: Place, line: Lines) -> None:
    """Write a line for the bytes, and one for each model in each precision."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for `deterministic`; read when cuBLAS starts
    line("bytes prepared as on the CPU", partial(_same_bytes, place))
    for model in MODELS[:1] if place.tiny else MODELS:
        for precision in ("float32", "tf32", "bfloat16"):
            line(f"{model} {precision}", partial(_compared, place, model, precision))
        line(f"{model} float32, deterministic", partial(_compared, place, model, "float32", deterministic=True))


def _same_bytes(place: Place) -> bool:
    raw = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 3, 1, 1)
    held = Inputs(torch.from_numpy(raw).to(place.device), Prepare(NORMALISE, 4, place.device))
    return bool(torch.equal(held[:].cpu(), NORMALISE(raw)))


def _compared(place: Place, model: str, precision: str, *, deterministic: bool = False) -> Found:
    one, two = (_trained(place, model, precision, deterministic=deterministic) for _ in range(2))
    apart = float((one - _exact(model, place.tiny)).abs().max())
    return {"from CPU": apart, "same twice": bool(torch.equal(one, two))}


@cache
def _exact(model: str, tiny: bool) -> Tensor:
    return _trained(Place(torch.device("cpu"), tiny), model, "float32")


def _trained(place: Place, model: str, precision: str, *, deterministic: bool = False) -> Tensor:
    net = network(place, model, precision, deterministic=deterministic)
    one = visit(net, 0, 60 if place.tiny else 500, text=model.startswith("lstm"))
    return train(net, Objective(Settings()), one, {}, settings(precision=precision)).flat.detach().cpu().clone()
