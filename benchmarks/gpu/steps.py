"""Milliseconds of a client's step: eager, captured, several streams; a batched round, eager and with graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.place import BATCH, CLIENTS, Place, network, settings, stepper
from benchmarks.gpu.report import Lines
from benchmarks.gpu.trainers import works
from fedcross.client.batched.captured import Together
from fedcross.client.batched.trainer import train_batched
from fedcross.client.cuda_recorder import record_cuda
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective

MODELS = ("lenet5", "resnet20", "vgg16_bn")
#: Each with whether channels lie last.
PRECISIONS = (("float32", True), ("float32", False), ("tf32", True), ("bfloat16", True))
#: How many steps are replayed at once.
STREAMS = (1, 4)


def measure(place: Place, line: Lines) -> None:
    """Write a line for each model, precision, layout and way; the other layout for float32 alone."""
    for model in MODELS[:1] if place.tiny else MODELS:
        for precision, last in PRECISIONS[:1] if place.tiny else PRECISIONS:
            name = f"{model} {precision} {'NHWC' if last else 'NCHW'}"
            made = partial(stepper, place, model, precision, last=last)
            line(f"{name}, eager", partial(_eager, place, made))
            for count in STREAMS if place.gpu else ():
                line(f"{name}, captured, {count} streams", partial(_captured, place, made, count))
        line(f"{model} batched, vmap", partial(_batched, place, model, recorded=False))
        if place.gpu:
            line(f"{model} batched, vmap + graph", partial(_batched, place, model, recorded=True))


def _eager(place: Place, made: Callable[[], Callable[[], None]]) -> float:
    return place.ms(made())


def _captured(place: Place, made: Callable[[], Callable[[], None]], count: int) -> float:
    """Return the milliseconds of a step while `count` of them are replayed at once, each on a stream of its own."""
    return place.ms(streams([made() for _ in range(count)])) / count


def streams(calls: list[Callable[[], None]]) -> Callable[[], None]:
    """Return a call that replays the recorded `calls`, each on its recording's stream; it keeps their tensors alive."""
    replays = [record_cuda(call) for call in calls]

    def all_of_them() -> None:
        for _, replay in zip(calls, replays, strict=True):  # a graph keeps addresses; `calls`, the tensors
            with torch.cuda.stream(replay.stream):
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
    clients = works(place, net, model, count=2 if place.tiny else CLIENTS, examples=examples)
    together = Together(net, Objective(Settings()), examples) if recorded else None
    call = partial(train_batched, net, Objective(Settings()), clients, settings(), together=together)
    whole = place.ms(call, 3)
    if together is not None and (together.refused or not together.replays):
        raise RuntimeError(f"not recorded: {together.refused}")
    return whole / len(clients) / (examples / BATCH)
