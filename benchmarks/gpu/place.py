"""Where to measure, and what the items share: networks, visits, and a step of the sequential trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.models import CLASSES, SHAPES, WORDS, build, is_text
from fedcross.client.device import set_arithmetic
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import step
from fedcross.conf.schema import Train
from fedcross.strategies.parts.objective import Visit
from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.reading.params import Normalise

BATCH, CLIENTS = 50, 10
#: How task=cifar10 prepares its pictures.
NORMALISE = Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 255.0)
GREY = Normalise((0.5,), (0.5,), 255.0)


@dataclass(frozen=True)
class Place:
    """Where to measure, and whether only the program is tried (`tiny`: one repetition, the smallest sizes)."""

    device: torch.device
    tiny: bool

    @property
    def gpu(self) -> bool:
        """Whether there are graphs, streams and memory to measure."""
        return self.device.type == "cuda"

    def ms(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Return the median milliseconds of `call`, the device's work included."""
        times = []
        for _ in range(1 if self.tiny else repeats + 3):
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - started)
        return median(times[-repeats:]) * 1e3

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.gpu:
            torch.cuda.synchronize(self.device)


def network(place: Place, model: str, precision: str = "float32", *, deterministic: bool = False) -> ModuleNet:
    """Return a network of `model` with its initial weights; settings of the device's arithmetic are those of a run."""
    net = ModuleNet(build(model), place.device, precision)
    arithmetic(place, precision, deterministic=deterministic)
    return net


def arithmetic(place: Place, precision: str, *, deterministic: bool = False) -> None:
    """Set how `place` computes in this process from now on.

    Raises
    ------
    RuntimeError
        If torch says otherwise afterwards. What the GPU then does, the lines "arithmetic" of ``accuracy`` measure.
    """
    set_arithmetic(place.device, settings(precision=precision, deterministic=deterministic))
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if place.gpu and allowed != (precision == "tf32",) * 2:
        raise RuntimeError(f"{precision} was asked for, but TF32 is allowed in products, convolutions: {allowed}")


def settings(**changes: Any) -> Train:
    """Return the optimiser's settings of the papers, one epoch."""
    return Train(**({"lr": 0.01, "momentum": 0.5, "epochs": 1, "batch": BATCH} | changes))


def visit(net: ModuleNet, client: int, examples: int, model: str = "lenet5") -> Visit:
    """Return the visit of a client with random `examples` of the shape that `model` takes."""
    generator = torch.Generator().manual_seed(client)
    y = torch.randint(CLASSES, (examples,), generator=generator)
    values: dict[str, Any] = {"extras": {}, "config": {}, "state": {}, "round": 1, "rounds": 1, "seed": 1}
    return Visit(
        net=net,
        params={name: p.detach().clone() for name, p in net.params.items()},
        buffers={name: b.clone() for name, b in net.buffers.items()},
        inputs=inputs_of(net, model, examples, client),
        y=y.to(net.device),
        client=client,
        classes=CLASSES,
        lr=0.01,
        **values,
    )


def inputs_of(net: ModuleNet, model: str, count: int, number: int = 0, *, last: bool | None = None) -> Inputs:
    """Return random examples as they lie on the device of `net`: words, or pictures as bytes.

    `last`: pictures with channels last, or first; default: as `net` arranges them.
    """
    generator, shape = torch.Generator().manual_seed(1000 + number), (count, *SHAPES[model])
    if is_text(model):
        return Inputs(torch.randint(WORDS, shape, generator=generator).to(net.device))
    held = torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(net.device)
    how = NORMALISE if shape[1] == 3 else GREY
    if last is None:
        held = net.arrange(held)
    elif last:
        held = held.contiguous(memory_format=torch.channels_last)
    return Inputs(held, Prepare(how, 4, net.device))


def stepper(place: Place, model: str, precision: str = "float32", *, last: bool = True) -> Callable[[], None]:
    """Return one step of the sequential trainer on fixed tensors; `last`: images with channels last."""
    net = network(place, model, precision)
    inputs, rows = inputs_of(net, model, 10 * BATCH, last=last), torch.arange(BATCH, device=place.device)
    y = torch.randint(CLASSES, (BATCH,), device=place.device)
    momentum, chosen = torch.zeros_like(net.flat), settings(precision=precision)

    def one() -> None:
        net.gradient.zero_()
        scores = net.logits(net.params, net.buffers, inputs[rows])
        functional.cross_entropy(scores, y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            step(net.flat, net.gradient, momentum, 0.01, chosen)

    return one
