"""Milliseconds of a convolution for ten clients, forward and backward: grouped (as vmap does), and one by one.

In float32 and in TF32, channels last as in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu.place import BATCH, CLIENTS, Place, arithmetic
from benchmarks.gpu.report import Lines


def measure(place: Place, line: Lines) -> None:
    """Write a line for each precision, way and pass."""
    clients, width, size = (2, 4, 8) if place.tiny else (CLIENTS, 32, 16)
    x = torch.randn(BATCH, clients * width, size, size, device=place.device)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(clients * width, width, 3, 3, device=place.device, requires_grad=True)
    slope = torch.randn_like(x)  # channels last too

    def grouped(*, backward: bool) -> None:
        out = functional.conv2d(x, w, padding=1, groups=clients)
        if backward:
            torch.autograd.grad(out, (x, w), slope)

    def looped(*, backward: bool) -> None:
        for part, kernel, own in zip(x.chunk(clients, 1), w.chunk(clients), slope.chunk(clients, 1), strict=True):
            out = functional.conv2d(part, kernel, padding=1)
            if backward:
                torch.autograd.grad(out, (part, kernel), own)

    for precision in ("float32", "tf32"):
        for name, call in {"grouped": grouped, "looped": looped}.items():
            for backward in (False, True):
                passes = "all three passes" if backward else "forward"
                measured = partial(_ms, place, precision, partial(call, backward=backward))
                line(f"{precision}, {name}, {passes}", measured)


def _ms(place: Place, precision: str, call: Callable[[], None]) -> float:
    arithmetic(place, precision)
    return place.ms(call)
