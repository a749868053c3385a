"""Six questions about a GPU: is it right, recorded, how fast are steps and rounds, how much memory, deterministic?

::

    python -m benchmarks.gpu                               # writes outputs/gpu.json
    python -m benchmarks.gpu --device cpu --tiny           # runs every line of this program without a GPU
    python -m benchmarks.gpu --only steps rounds

Every line is a fedcross run as a user makes it, on random images. A line that fails says why and the others go on. The
exit code is 1 if a line failed or a limit is passed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcross
from benchmarks.harness import Workload, images, machine

RIGHT = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest distance of a model from the CPU's, as a share of what training changed."""
MODELS = ("lenet5", "resnet20", "vgg16_bn")
METHODS = ("fedcross", "fedavg", "scaffold", "fedfan")
ENGINES = {"local": ["engine=local", "engine.workers=1"], "batched": ["engine=batched"]}

Found = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where and how much to measure: torch's name of the device, the smallest sizes or not, folder of images."""

    device: str
    tiny: bool
    folder: Path

    def work(self, model: str = "lenet5") -> Workload:
        """Return the workload of a round."""
        return Workload(model, clients=3, examples=20, drawn=2, epochs=1, batch=10) if self.tiny else Workload(model)


@dataclass(frozen=True)
class Finished:
    """A run: its metrics, the final model, what training changed (norm), its peak of GPU memory in MiB, seconds."""

    metrics: Any
    model: dict[str, np.ndarray[Any, Any]]
    moved: float
    peak: float
    seconds: float


def run(place: Place, model: str, *settings: str, rounds: int = 2, device: str = "") -> Finished:
    """Run fedcross on the images of `place` and return what came of it.

    Raises
    ------
    RuntimeError
        If a round lost a client, or a number of the model is not finite.
    """
    from fedcross.conf.schema import load

    device = device or place.device
    given = [one for one in place.work(model).settings(place.folder, *settings) if not one.startswith("device=")]
    with tempfile.TemporaryDirectory(prefix="fedcross-gpu-") as name, contextlib.redirect_stdout(io.StringIO()):
        given += [f"device={device}", f"rounds={rounds}", f"output={name}/run"]
        config = load(given)
        first, _ = config.network(config.load_data().task)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        done = fedcross.run(*given)
        seconds = time.perf_counter() - began
        model_now, metrics = arrays(done.model), done.metrics
    if metrics["dropped"].any():
        raise RuntimeError(f"{metrics['dropped'].sum()} clients were lost")
    if not all(np.isfinite(array).all() for array in model_now.values()):
        raise RuntimeError("the model has numbers that are not finite")
    peak = torch.cuda.max_memory_allocated() / 2**20 if device != "cpu" else 0.0
    return Finished(metrics, model_now, distance(arrays(first), model_now), peak, seconds)


def arrays(network: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the floating-point arrays of a network in float64."""
    return {n: t.double().cpu().numpy() for n, t in network.state_dict().items() if t.is_floating_point()}


def distance(one: dict[str, np.ndarray[Any, Any]], other: dict[str, np.ndarray[Any, Any]]) -> float:
    """Return the Euclidean distance of two models."""
    return float(np.sqrt(sum(((other[name] - array) ** 2).sum() for name, array in one.items())))


def right(place: Place, model: str, engine: str, precision: str) -> Found:
    """Is a model that was trained here the CPU's? Its distance as a share of what training changed."""
    cpu = run(place, model, *ENGINES["local"], device="cpu", rounds=1)
    here = run(place, model, *ENGINES[engine], f"train.precision={precision}", rounds=1)
    share = distance(cpu.model, here.model) / cpu.moved
    return {"share": share, "limit": RIGHT[precision], "ok": share <= RIGHT[precision]}


def recorded(place: Place, model: str) -> Found:
    """Does a recorded step (CUDA graph) give the called step's model, and how much faster is it?"""
    called = run(place, model, "engine=batched", "engine.cuda_graph=false", rounds=3)
    graph = run(place, model, "engine=batched", "engine.cuda_graph=true", rounds=3)
    share = distance(called.model, graph.model) / called.moved
    times = [float(one.metrics["seconds_training"].iloc[-1]) for one in (called, graph)]
    told = {"called s": times[0], "recorded s": times[1], "times faster": times[0] / times[1]}
    return {"share": share, **told, "ok": share <= RIGHT["float32"]}


def steps(place: Place, model: str, engine: str, precision: str) -> Found:
    """How many milliseconds does a step take in a round, by model, engine and precision?"""
    work = place.work(model)
    done = run(place, model, *ENGINES[engine], f"train.precision={precision}", rounds=2 if place.tiny else 4)
    count = work.drawn * work.epochs * -(-work.examples // work.batch)
    return {"ms a step": 1000 * float(done.metrics["seconds_training"].iloc[1:].median()) / count}


def rounds(place: Place, method: str, engine: str) -> Found:
    """How many seconds does a round take, by method and engine? With the first round apart."""
    done = run(place, "lenet5", f"method={method}", *ENGINES[engine], rounds=2 if place.tiny else 10)
    seconds = done.metrics["seconds"]
    return {"s/round": float(seconds.iloc[1:].median()), "first s": float(seconds.iloc[0])}


def memory(place: Place, model: str, engine: str) -> Found:
    """How much GPU memory does a round take, and does it grow over rounds?"""
    few = run(place, model, *ENGINES[engine], rounds=1 if place.tiny else 2).peak
    more = run(place, model, *ENGINES[engine], rounds=2 if place.tiny else 8).peak
    return {"MiB": few, "MiB after more rounds": more, "ok": place.device == "cpu" or more <= 1.1 * few + 64}


def determinism(place: Place, engine: str) -> Found:
    """Does ``train.deterministic`` give the same model twice, and what does it cost?"""
    free = run(place, "lenet5", *ENGINES[engine])
    one, two = (run(place, "lenet5", *ENGINES[engine], "train.deterministic=true") for _ in range(2))
    same = all(np.array_equal(array, two.model[name]) for name, array in one.model.items())
    times = [float(done.metrics["seconds"].iloc[-1]) for done in (free, one)]
    return {"same": same, "times slower": times[1] / times[0], "ok": same}


QUESTIONS: dict[str, tuple[Callable[..., Found], list[Sequence[str]]]] = {
    "right": (right, [MODELS, [*ENGINES], [*RIGHT]]),
    "recorded": (recorded, [MODELS]),
    "steps": (steps, [MODELS, [*ENGINES], ["float32", "tf32", "bfloat16"]]),
    "rounds": (rounds, [METHODS, [*ENGINES]]),
    "memory": (memory, [MODELS, [*ENGINES]]),
    "determinism": (determinism, [[*ENGINES]]),
}
"""Question -> its function and the values of each argument. ``--tiny`` takes one model, method and precision."""


def main(arguments: list[str] | None = None) -> int:
    """Measure what the arguments ask for; return 0, 1 if a line failed, or 2 if the device cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), help="default: all six")
    parser.add_argument("--device", default="cuda", help="cuda (the default), cuda:1, ..., or cpu")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: tries the program")
    parser.add_argument("--seconds", type=float, default=480.0, help="no line begins after so many (default: 480)")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu.json"))
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        print("torch finds no GPU here; --device cpu --tiny tries the program.", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(given.device) if given.device != "cpu" else "cpu"
    report: Found = {"device": name, "tiny": given.tiny, "machine": machine(), "questions": {}}
    began, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="fedcross-gpu-") as folder:
        os.environ |= {"FEDCROSS_STATE": f"{folder}/state", "FEDCROSS_CACHE": f"{folder}/cache"}
        place = Place(given.device, given.tiny, Path(folder))
        images(place.work(), place.folder)
        for question in given.only:
            lines = report["questions"].setdefault(question, {})
            measure, values = QUESTIONS[question]
            for case in product(*(v[:1] if given.tiny and v != [*ENGINES] else v for v in values)):
                title, line = " ".join(case), partial(measure, place, *case)
                lines[title] = _measured(line) if time.monotonic() - began < given.seconds else {"left out": "no time"}
                failed += not lines[title].get("ok", "left out" not in lines[title])
                print(f"{question}: {title}: {_text(lines[title])}", flush=True)
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{given.output}: {failed} lines failed")
    return int(failed > 0)


def _measured(line: Callable[[], Found]) -> Found:
    try:
        return line()
    except Exception as error:  # noqa: BLE001 - one line's fault; the report says it and the exit code is 1
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "ok": False}


def _text(found: Found) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


if __name__ == "__main__":
    sys.exit(main())
