"""Seconds to record a step, and the memory after each of 20 rounds of both trainers with graphs."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch

from benchmarks.gpu.machine import other_processes
from benchmarks.gpu.place import BATCH, CLIENTS, Place, network, settings, stepper
from benchmarks.gpu.report import Found, Lines
from benchmarks.gpu.trainers import one_by_one, replayed, works
from fedcross.client.batched.captured import Together
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.cuda_recorder import record_cuda
from fedcross.client.graph_memory import kept_by_graphs
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective

#: The last has the most operations: without cuDNN, under vmap, 80 characters are unrolled.
MODELS = ("lenet5", "resnet20", "lstm")


def measure(place: Place, line: Lines) -> None:
    """Write how long a recording takes for each model, and what 20 rounds keep."""
    if not place.gpu:
        line("skipped", lambda: "graphs need a GPU")
        return
    models = MODELS[:1] if place.tiny else MODELS
    for model in models:
        line(f"{model}, seconds a recording", partial(_seconds, place, model))
    for model in models:
        line(f"{model}, 20 rounds", partial(_rounds, place, model))


def _seconds(place: Place, model: str) -> float:
    one, times = stepper(place, model), []
    one()  # libraries start at the first call
    for _ in range(5):
        place.wait()
        started = time.perf_counter()
        replay = record_cuda(one)
        place.wait()
        times.append(time.perf_counter() - started)
        replay()
    return median(times)


def _rounds(place: Place, model: str) -> Found:
    net, objective = network(place, model), Objective(Settings())
    start = {name: array.copy() for name, array in net.read().items()}
    examples, count = (BATCH * 2, 2) if place.tiny else (BATCH * 10, CLIENTS)
    captured, together = Captured(net, objective, examples), Together(net, objective, examples)
    clients = works(place, net, model, count=count, examples=examples)
    reserved, kept, used, others = [], [], [], other_processes(place.device)
    for _ in range(20):
        train_batched(net, objective, clients, settings(), together=together)
        one_by_one(net, start, clients, captured.train)
        reserved.append(round(torch.cuda.memory_reserved(place.device) / 1e6, 1))
        kept.append(round(kept_by_graphs(place.device) / 1e6, 1))
        free, whole = torch.cuda.mem_get_info(place.device)
        used.append(round((whole - free) / 1e6, 1))  # the driver's number: CUDA's own memory for graphs too
    return {
        "reserved, MB": reserved,
        "kept by graphs, MB": kept,
        "used of the card, MB": used,
        "other processes": max(others, other_processes(place.device)),
        "captured": replayed([captured], place),
        "batched": replayed([together], place),
    }
