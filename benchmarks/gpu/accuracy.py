"""Weights after one epoch: the device against the CPU, in each precision, and the device against itself.

And whether it prepares every value of a byte as the CPU does.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.expected import LACKS
from benchmarks.gpu.place import NORMALISE, Place, arithmetic, network, settings, visit
from benchmarks.gpu.report import Found, Lines
from benchmarks.gpu.rounds import LOCAL, farthest, ran
from fedcross.client.autocast import bfloat16, has_bfloat16
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective
from fedcross.tasks.inputs import Inputs, Prepare

MODELS = ("lenet5", "resnet20", "lstm")
PRECISIONS = ("float32", "tf32", "bfloat16")
#: Pictures and weights of convolutions, a small one and VGG-16's, and the factors of a product.
CONVOLUTIONS = (((16, 32, 16, 16), (64, 32, 3, 3)), ((50, 256, 8, 8), (512, 256, 3, 3)))
PRODUCT = ((256, 512), (512, 256))
#: For a model that takes a CPU long.
EXAMPLES = {"vgg_femnist": 110}


def measure(place: Place, line: Lines) -> None:
    """Write a line for the bytes, and one for each model in each precision."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for `deterministic`; read when cuBLAS starts
    line("bytes prepared as on the CPU", partial(_same_bytes, place))
    for precision in PRECISIONS:
        line(f"arithmetic {precision}", partial(rounding, place, precision))
    for model in MODELS[:1] if place.tiny else MODELS:
        for precision in PRECISIONS:
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


def rounding(place: Place, precision: str) -> dict[str, float]:
    """Return how far convolutions and a product on this device are from float64's, as a share of their length.

    A training's weights do not tell TF32 from float32: these are apart by 3e-4 and by 1e-6. Of convolutions it is the
    farthest one's: cuDNN computes small ones in float32 where TF32 is allowed (seen on an H200).
    """
    arithmetic(place, precision)
    generator = torch.Generator().manual_seed(1)
    rows = CONVOLUTIONS if place.gpu else CONVOLUTIONS[:1]
    pairs = [
        [torch.randn(shape, generator=generator).to(place.device) for shape in shapes] for shapes in (*rows, PRODUCT)
    ]
    with bfloat16(place.device, recurrent=False) if precision == "bfloat16" else nullcontext():
        found = [_product(*pair) for pair in pairs]
    exact = [_product(*(one.double() for one in pair)) for pair in pairs]
    *convolutions, product = (
        float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)
    )
    return {"convolution": max(convolutions), "product": product}


def _product(one: Tensor, other: Tensor) -> Tensor:
    return functional.conv2d(one, other, padding=1) if one.dim() == 4 else one @ other


def _same_bytes(place: Place) -> bool:
    raw = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 3, 1, 1)
    held = Inputs(torch.from_numpy(raw).to(place.device), Prepare(NORMALISE, 4, place.device))
    return bool(torch.equal(held[:].cpu(), NORMALISE(raw)))


def _compared(place: Place, model: str, precision: str, *, deterministic: bool = False) -> Found | str:
    if lacks(place, model, precision):
        return LACKS
    one, two = (trained(place, model, precision, deterministic=deterministic) for _ in range(2))
    apart = float((one - _exact(model, place.tiny)).abs().max())
    return {"from CPU": apart, "same twice": bool(torch.equal(one, two))}


def lacks(place: Place, model: str, precision: str) -> bool:
    """Return whether this device is a CPU without a recurrent layer in bfloat16: fedcross computes in float32 there."""
    return not place.gpu and (model, precision) == ("lstm", "bfloat16") and not has_bfloat16()


@cache
def _exact(model: str, tiny: bool) -> Tensor:
    return trained(Place(torch.device("cpu"), tiny), model, "float32")


def trained(place: Place, model: str, precision: str, *, deterministic: bool = False) -> Tensor:
    """Return the weights of `model` after an epoch, on the CPU."""
    net = network(place, model, precision, deterministic=deterministic)
    one = visit(net, 0, 60 if place.tiny else EXAMPLES.get(model, 500), model)
    return train(net, Objective(Settings()), one, {}, settings(precision=precision)).flat.detach().cpu().clone()
