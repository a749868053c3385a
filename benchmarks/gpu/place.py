"""Where to measure, and what the items share: networks, visits, and a step of the sequential trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from fedcross.client.device import set_arithmetic
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import step
from fedcross.conf.schema import Train, settings_class
from fedcross.strategies.parts.objective import Visit
from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.models import create
from fedcross.tasks.reading.params import Normalise

BATCH, CLIENTS = 50, 10
#: How task=cifar10 prepares its pictures.
NORMALISE = Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 255.0)


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
    text = model.startswith("lstm")
    task: Any = SimpleNamespace(name="made up", shape=(80,) if text else (3, 32, 32), classes=10, vocabulary=80)
    net = ModuleNet(create(model, settings_class("model", model)(), task, 1), place.device, precision)
    set_arithmetic(place.device, settings(precision=precision, deterministic=deterministic))
    return net


def settings(**changes: Any) -> Train:
    """Return the optimiser's settings of the papers, one epoch."""
    return Train(**({"lr": 0.01, "momentum": 0.5, "epochs": 1, "batch": BATCH} | changes))


def visit(net: ModuleNet, client: int, examples: int, *, text: bool = False) -> Visit:
    """Return the visit of a client with random `examples`."""
    generator = torch.Generator().manual_seed(client)
    y = torch.randint(10, (examples,), generator=generator)
    words = Inputs(torch.randint(80, (examples, 80), generator=generator).to(net.device))
    values: dict[str, Any] = {"extras": {}, "config": {}, "state": {}, "round": 1, "rounds": 1, "seed": 1}
    return Visit(
        net=net,
        params={name: p.detach().clone() for name, p in net.params.items()},
        buffers={name: b.clone() for name, b in net.buffers.items()},
        inputs=words if text else pictures(net, examples, client),
        y=y.to(net.device),
        client=client,
        classes=10,
        lr=0.01,
        **values,
    )


def pictures(net: ModuleNet, count: int, number: int = 0, *, last: bool = True) -> Inputs:
    """Return random pictures as they lie on the device of `net`, as bytes; `last`: with channels last."""
    generator = torch.Generator().manual_seed(1000 + number)
    held = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8).to(net.device)
    return Inputs(net.arrange(held) if last else held, Prepare(NORMALISE, 4, net.device))


def stepper(place: Place, model: str, precision: str = "float32", *, last: bool = True) -> Callable[[], None]:
    """Return one step of the sequential trainer on fixed tensors; `last`: images with channels last."""
    net = network(place, model, precision)
    inputs, rows = pictures(net, 10 * BATCH, last=last), torch.arange(BATCH, device=place.device)
    y = torch.randint(10, (BATCH,), device=place.device)
    momentum, chosen = torch.zeros_like(net.flat), settings(precision=precision)

    def one() -> None:
        net.gradient.zero_()
        scores = net.logits(net.params, net.buffers, inputs[rows])
        functional.cross_entropy(scores, y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            step(net.flat, net.gradient, momentum, 0.01, chosen)

    return one
