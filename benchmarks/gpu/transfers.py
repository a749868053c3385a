"""Milliseconds to load a model, read it, bring a client's data and score 1000 examples."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.place import Place, network
from benchmarks.gpu.report import Found, Lines

MODELS = ("lenet5", "resnet20", "vgg16_bn")


def measure(place: Place, line: Lines) -> None:
    """Write a line for each model."""
    for model in MODELS[:1] if place.tiny else MODELS:
        line(model, partial(_times, place, model))


@torch.no_grad()
def _times(place: Place, model: str) -> Found:
    net = network(place, model)
    arrays = {name: array.copy() for name, array in net.read().items()}
    held = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8)
    images = torch.randn(10 if place.tiny else 1000, 3, 32, 32).to(place.device)
    score = partial(net.logits, net.params, net.buffers, images, train=False)
    return {
        "load": place.ms(partial(net.load, arrays)),
        "upload": place.ms(net.read),
        "data": place.ms(partial(held.to, place.device)),
        "data as float32": place.ms(partial(held.float().to, place.device)),
        "evaluation": place.ms(score, repeats=5),
    }
