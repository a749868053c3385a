"""Milliseconds of a client's step: eager, captured, several streams; a batched round, eager and with graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.place import BATCH, CLIENTS, Place, network, settings, stepper, visit
from benchmarks.gpu.report import Lines
from fedcross.client.batched.captured import Together
from fedcross.client.batched.state import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.cuda_recorder import record_cuda
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective

MODELS = ("lenet5", "resnet20", "vgg16_bn")


def measure(place: Place, line: Lines) -> None:
    """Write a line for each model, precision, layout and way."""
    for model in MODELS[:1] if place.tiny else MODELS:
        for precision in ("float32",) if place.tiny else ("float32", "tf32", "bfloat16"):
            for last in (True,) if place.tiny else (True, False):
                name = f"{model} {precision} {'NHWC' if last else 'NCHW'}"
                made = partial(stepper, place, model, precision, last=last)
                line(f"{name}, eager", partial(_eager, place, made))
                for count in (1, 2, 4, 8) if place.gpu else ():
                    line(f"{name}, captured, {count} streams", partial(_captured, place, made, count))
        line(f"{model} batched, vmap", partial(_batched, place, model, recorded=False))
        if place.gpu:
            line(f"{model} batched, vmap + graph", partial(_batched, place, model, recorded=True))


def _eager(place: Place, made: Callable[[], Callable[[], None]]) -> float:
    return place.ms(made())


def _captured(place: Place, made: Callable[[], Callable[[], None]], count: int) -> float:
    """Return the milliseconds of a step while `count` of them are replayed at once, each on a stream of its own."""
    return place.ms(streams(place, [made() for _ in range(count)])) / count


def streams(place: Place, calls: list[Callable[[], None]]) -> Callable[[], None]:
    """Return a call that replays the recorded `calls`, each on a stream of its own; it keeps their tensors alive."""
    own = [torch.cuda.Stream(place.device) for _ in calls]  # type: ignore[no-untyped-call]
    replays = [record_cuda(call, stream) for call, stream in zip(calls, own, strict=True)]

    def all_of_them() -> None:
        for _, replay, stream in zip(calls, replays, own, strict=True):  # a graph keeps addresses; `calls`, the tensors
            with torch.cuda.stream(stream):
                replay()

    return all_of_them


def _batched(place: Place, model: str, *, recorded: bool) -> float:
    """Return the milliseconds of a client's step in a round of ten.

    Raises
    ------
    RuntimeError
        If steps should have been recorded and were not.
    """
    net, examples = network(place, model), BATCH * (2 if place.tiny else 10)  # the first step is called
    works = [Work(visit(net, i, examples), {}, {}) for i in range(2 if place.tiny else CLIENTS)]
    together = Together(net, Objective(Settings()), examples) if recorded else None
    call = partial(train_batched, net, Objective(Settings()), works, settings(), together=together)
    whole = place.ms(call, 3)
    if together is not None and (together.refused or not together.replays):
        raise RuntimeError(f"not recorded: {together.refused}")
    return whole / len(works) / (examples / BATCH)
