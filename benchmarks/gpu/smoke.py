"""One method, every model, and what is rare, sequential and batched; all compared with the CPU."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import rare
from benchmarks.gpu.accuracy import lacks
from benchmarks.gpu.expected import LACKS, ONE
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.place import Place, network, visit
from benchmarks.gpu.report import Found, Lines
from benchmarks.gpu.rounds import FIRST, NETWORKS, farthest, on_both_engines, on_cpu, ran
from benchmarks.gpu.trainers import both_trainers
from fedcross.tasks.augment import Augment, build

MODELS = tuple(SHAPES)


def measure(place: Place, line: Lines) -> None:
    """Write a line for one method on both engines, each model, layers, and what is rare."""
    on_both_engines(place, line, FIRST)
    for model in MODELS[:1] if place.tiny else MODELS:
        line(model, partial(both_trainers, place, model))
    for name in () if place.tiny else [*filter(None, NETWORKS)]:
        on_both_engines(place, line, FIRST, name)
    line("recurrent layers", partial(_recurrent, place))
    line("augmentation", partial(_augmented, place))
    line("little memory", partial(rare.little_memory, place))
    line("deterministic, asked for late", partial(rare.deterministic_late, place))
    line("second GPU", partial(rare.second_gpu, place))
    line("a worker on each GPU", partial(_workers, place))


def _workers(place: Place) -> Found | str:
    """Run a method with a process on each of two GPUs; return how far its model is from the CPU's."""
    if not rare.several(place):
        return ONE
    model, *_ = ran(FIRST, ["engine=local", "engine.workers=2"], "cuda")
    return {"from CPU": farthest(on_cpu(FIRST)[0], model)}


def _recurrent(place: Place) -> Found:
    """Return in which type the LSTM gives its result, for each type asked for: cuDNN's autocast makes float16 of it."""
    found = {}
    for precision in ("float32", "bfloat16"):
        if lacks(place, "lstm", precision):
            found[precision] = LACKS
            continue
        net = network(place, "lstm", precision)
        kinds: set[str] = set()
        for part in net.module.modules():
            if isinstance(part, torch.nn.RNNBase):
                part.register_forward_hook(lambda _, __, out, kinds=kinds: kinds.add(str(out.dtype)))
        net.logits(net.params, net.buffers, visit(net, 0, 4, "lstm").x)
        found[precision] = ", ".join(sorted(kinds)).removeprefix("torch.")
    return found


def _augmented(place: Place) -> list[int]:
    augment = build(Augment(crop=4, flip=True, rotate=15, resized_crop=True))
    assert augment is not None
    images = torch.randn(8, 3, 32, 32, device=place.device)
    return list(augment(images, torch.Generator().manual_seed(1)).shape)
