"""The ten dearest operations of three steps, and the number of operator calls in a step."""

from __future__ import annotations

from functools import partial

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.place import Place, stepper
from benchmarks.gpu.report import Found, Lines


def measure(place: Place, line: Lines) -> None:
    """Write a line for the model."""
    model = "lenet5" if place.tiny else "resnet20"
    line(model, partial(_seen, place, model))


def _seen(place: Place, model: str) -> Found:
    one = stepper(place, model)
    one()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.gpu else [])]
    with profile(activities=kinds) as seen:
        for _ in range(3):
            one()
        place.wait()
    rows = [(e.key, e.count, e.self_device_time_total or e.self_cpu_time_total) for e in seen.key_averages()]
    called = sum(count for key, count, _ in rows if key.startswith("aten::"))
    dearest = sorted(rows, key=lambda row: -row[2])[:10]
    return {"calls a step": called / 3, "dearest, us": [[k, c, t] for k, c, t in dearest]}
