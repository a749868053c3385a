"""Two clients in both trainers, with and without recorded steps, and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import BATCH, Place, network, settings, visit
from benchmarks.gpu.report import Found
from fedcross.client.batched.captured import Together
from fedcross.client.batched.state import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective, Trained
from fedcross.tasks.models.dropout import dropout_states


def replayed(recorders: Sequence[Any], place: Place) -> Found:
    """Return what `recorders` did: only replayed steps count as recorded."""
    if not place.gpu:
        return {"ran": "not recorded", "replays": 0, "reasons": ["there is no GPU"]}
    replays = sum(recorder.replays for recorder in recorders)
    if not recorders:
        return {"ran": "not recorded", "replays": 0, "reasons": ["nothing was to be recorded"]}
    reasons = sorted({recorder.refused for recorder in recorders if recorder.refused is not None})
    if replays and not reasons:
        return {"ran": "recorded", "replays": replays}
    why = [recorder.why for recorder in recorders if recorder.why]
    found = {"ran": "not recorded", "replays": replays, "reasons": reasons or ["no visit had two full batches"]}
    return found | ({"why": why} if why else {})


def both_trainers(place: Place, model: str) -> Found:
    """Train two clients in both trainers, with and without recorded steps, and one of them on the CPU.

    Returns
    -------
    dict
        ``apart``: the largest difference of a weight from the plain loop's. ``from CPU``: from the CPU's plain loop's.
        ``share of CPU's change``: the length of that difference as a share of what training changed. Without a GPU a
        recorded step is a called one.
    """
    net = network(place, model)
    start = {name: array.copy() for name, array in net.read().items()}
    objective, record = Objective(Settings()), None if place.gpu else called
    works = pair(place, net, model)
    captured, together = Captured(net, objective, record=record), Together(net, objective, record=record)
    # Twice: what is recorded and compared in the first pass is only repeated in the second.
    found = {
        "plain": one_by_one(net, start, works, partial(train, net, objective)),
        "batched": train_batched(net, objective, works, settings()),
        "captured": [one_by_one(net, start, works, captured.train) for _ in range(2)][1],
        "batched, captured": [train_batched(net, objective, works, settings(), together=together) for _ in range(2)][1],
    }
    near = {way: from_cpu(model, trained[0].flat) for way, trained in found.items()}
    return {
        "apart": {way: apart(found["plain"], other) for way, other in found.items() if way != "plain"},
        "from CPU": {way: largest for way, (largest, _) in near.items()},
        "share of CPU's change": {way: share for way, (_, share) in near.items()},
        "captured": replayed([captured], place),
        "batched, captured": replayed([together], place),
    }


def pair(place: Place, net: ModuleNet, model: str) -> list[Work]:
    """Return two clients of four full batches and a short one."""
    return works(place, net, model, count=2, examples=4 * BATCH + 20)


def works(place: Place, net: ModuleNet, model: str, *, count: int, examples: int) -> list[Work]:
    """Return `count` clients with `examples` each; dropout draws the same on every device."""
    scratch = {n: s.to(place.device) for n, s in dropout_states(net.module, 1).items()}
    return [Work(visit(net, i, examples, model), {}, scratch) for i in range(count)]


def apart(one: Sequence[Trained], other: Sequence[Trained]) -> float:
    """Return the largest difference of a weight; NaN if one is, unlike ``max``."""
    return float(torch.stack([(a.flat - b.flat).abs().max() for a, b in zip(one, other, strict=True)]).max())


def from_cpu(model: str, flat: Tensor) -> tuple[float, float]:
    """Return how far the weights of the first client of :func:`pair` are from the CPU's, largest and as a share."""
    before, after = _on_cpu(model)
    away = flat.detach().cpu().double() - after
    return float(away.abs().max()), float(away.norm() / (after - before).norm())


@lru_cache(maxsize=1)
def _on_cpu(model: str) -> tuple[Tensor, Tensor]:
    """Return the weights of the first client before and after the CPU's plain loop, float64 (p,)."""
    place = Place(torch.device("cpu"), tiny=False)
    net = network(place, model)
    before, start = net.flat.detach().double().clone(), {name: array.copy() for name, array in net.read().items()}
    (trained,) = one_by_one(net, start, pair(place, net, model)[:1], partial(train, net, Objective(Settings())))
    return before, trained.flat.detach().double()


def called(call: Callable[[], None]) -> Callable[[], None]:
    """Take the place of recording a step."""
    return call


def one_by_one(
    net: ModuleNet, start: dict[str, Any], works: Sequence[Work], trainer: Callable[..., Trained]
) -> list[Trained]:
    """Return what `trainer` makes of each client from the model `start`, as copies."""
    found = []
    for work in works:
        net.load(start)
        for name, state in work.dropout.items():
            net.module.get_buffer(name).copy_(state)
        trained = trainer(work.visit, work.prepared, settings())
        found.append(replace(trained, flat=trained.flat.clone()))
        net.logits(net.params, net.buffers, work.visit.x, train=False)
    return found
