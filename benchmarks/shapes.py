"""Shapes of the networks that the aggregation and wire benchmarks use, without building them."""

from __future__ import annotations

import math

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, dtype name), in ``state_dict`` order."""


def shapes(name: str) -> Shapes:
    """Return name -> (shape, dtype) of the ``state_dict`` of a model, in its order.

    ``lenet5``, ``resnet18`` and ``vgg16_bn`` are the papers' networks for 32x32 images and 10 classes, ``vgg16`` is the
    one for 224x224 images and 1000 classes.
    """
    found: Shapes = {}

    def add(*shape: int, bias: bool = True) -> None:
        found[f"{len(found)}.weight"] = shape, "float32"
        if bias:
            found[f"{len(found)}.bias"] = shape[:1], "float32"

    def norm(width: int) -> None:
        add(width)
        found[f"{len(found)}.running_mean"] = found[f"{len(found) + 1}.running_var"] = (width,), "float32"
        found[f"{len(found)}.num_batches_tracked"] = (), "int64"

    if name == "lenet5":
        for shape in ((6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)):
            add(*shape)
    elif name == "resnet18":
        inputs = 3
        for width, kernels in ((64, (3, 3, 3, 3, 3)), *((w, (3, 3, 1, 3, 3)) for w in (128, 256, 512))):
            for kernel in kernels:
                add(width, width // 2 if kernel == 1 else inputs, kernel, kernel, bias=False)
                norm(width)
                inputs = width
        add(10, 512)
    else:
        inputs = 3
        for width in (64, 64, 128, 128, 256, 256, 256, *[512] * 6):
            add(width, inputs, 3, 3)
            if name == "vgg16_bn":
                norm(width)
            inputs = width
        for shape in (
            (4096, 512 if name == "vgg16_bn" else 25088),
            (4096, 4096),
            (10 if name == "vgg16_bn" else 1000, 4096),
        ):
            add(*shape)
    return found


def float_values(model: Shapes) -> int:
    """Return d."""
    return sum(math.prod(shape) for shape, dtype in model.values() if dtype == "float32")
