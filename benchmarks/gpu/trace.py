"""The ten dearest operations of three steps, and the number of operator calls in a step."""

from __future__ import annotations

from functools import partial

from torch.autograd import DeviceType  # type: ignore[attr-defined]
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
    events = seen.key_averages()
    called = sum(e.count for e in events if e.key.startswith("aten::"))
    if place.gpu:  # kernels alone: launches and waits are the host's time
        rows = [(e.key, e.count, e.self_device_time_total) for e in events if e.device_type == DeviceType.CUDA]
    else:
        rows = [(e.key, e.count, e.self_cpu_time_total) for e in events]
    dearest = sorted(rows, key=lambda row: -row[2])[:10]
    return {"calls a step": called / 3, "dearest, us": [[k, c, t] for k, c, t in dearest]}
