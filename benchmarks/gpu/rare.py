"""What a run meets rarely: memory that is too small, late settings, a second GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.gpu.accuracy import trained
from benchmarks.gpu.expected import ONE
from benchmarks.gpu.place import Place, network, settings
from benchmarks.gpu.report import Found
from benchmarks.gpu.trainers import apart, both_trainers, called, one_by_one, pair, replayed
from fedcross.client.batched.captured import Together
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.trainer import train
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective

#: What the plain loop takes, times this, is the memory of :func:`little_memory`: a step, but none beside its recording.
ROOM = 1.1


def little_memory(place: Place) -> Found:
    """Train with just the memory that the plain loops take, sequential and batched.

    Returns
    -------
    dict
        ``apart`` from what the plain loops gave, whether steps were recorded nevertheless, and how many of two
        clients trained ``at once`` in the end.
    """
    model = "lenet5" if place.tiny else "resnet20"
    net, objective, record = network(place, model), Objective(Settings()), None if place.gpu else called
    start, works = {name: array.copy() for name, array in net.read().items()}, pair(place, net, model)
    captured, together = Captured(net, objective, record=record), Together(net, objective, record=record)
    sequential = partial(one_by_one, net, start, works)
    plain = partial(train, net, objective)
    with limited(place, lambda: sequential(plain)):
        alone = sequential(captured.train)
    captured.release()
    batched = partial(train_batched, net, objective, works, settings())
    with limited(place, batched):
        both = batched(together=together)
    expected = sequential(plain)
    return {
        "apart": {"captured": apart(expected, alone), "batched, captured": apart(expected, both)},
        "captured": replayed([captured], place),
        "batched, captured": replayed([together], place),
        "at once": together.at_once(works[0], settings(), 2, lambda: 2),
    }


@contextmanager
def limited(place: Place, call: Callable[[], object]) -> Iterator[None]:
    """Let torch have little more memory inside the block than `call` takes."""
    if not place.gpu:
        yield
        return
    device = place.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    place.wait()
    reserved, (_, whole) = torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)
    # torch reserves large pieces: less than those may be too little for the plain loop, more is not needed.
    most = max(ROOM * torch.cuda.max_memory_allocated(device), reserved)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(most / whole, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def deterministic_late(place: Place) -> dict[str, bool]:
    """Ask for deterministic algorithms after cuBLAS has started; return which models train the same twice.

    So does a process that trains for a second run. cuBLAS reads its variable once.
    """
    found = {}
    for model in ("lenet5",) if place.tiny else ("lenet5", "lstm"):
        trained(place, model, "float32")
        one, two = (trained(place, model, "float32", deterministic=True) for _ in range(2))
        found[model] = bool(torch.equal(one, two))
    network(place, "mlp")  # sets the arithmetic of the lines that follow
    return found


def several(place: Place) -> bool:
    """Return whether there is a second GPU."""
    return place.gpu and torch.cuda.device_count() > 1


def second_gpu(place: Place) -> Found | str:
    """Train on another GPU than the one of all other lines."""
    if not several(place):
        return ONE
    other = torch.device("cuda", 0 if place.device.index else 1)
    torch.cuda.set_device(other)
    try:
        return both_trainers(Place(other, place.tiny), "lenet5")
    finally:
        torch.cuda.set_device(place.device)
