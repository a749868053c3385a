"""The first eight minutes on a GPU: does everything run there, how exact is it, and where does the time go.

::

    python -m benchmarks.gpu                              # all items in order, outputs/gpu.json
    python -m benchmarks.gpu --only accuracy --only steps
    python -m benchmarks.gpu --device cpu --tiny          # the program itself, without a GPU

The file is written anew after each item, so an interrupted run keeps what it has found. An item that fails leaves its
error there and the next one starts. Needs torch and the packages of fedcross, no data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedcross.client.batched.captured import Together
from fedcross.client.batched.state import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.cuda_graphs import record_cuda
from fedcross.client.device import pick_device, set_arithmetic
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import step, train
from fedcross.conf.schema import Train, settings_class
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective, Trained, Visit
from fedcross.tasks.augment import Augment, build
from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.models import create
from fedcross.tasks.models.dropout import dropout_states
from fedcross.tasks.reading.params import Normalise

BATCH, CLIENTS = 50, 10
#: How task=cifar10 prepares its pictures.
NORMALISE = Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 255.0)
Found = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where to measure, and whether only the program is tried (`tiny`: one repetition, the smallest sizes)."""

    device: torch.device
    tiny: bool

    @property
    def gpu(self) -> bool:
        """Whether there are graphs, streams and memory to measure."""
        return self.device.type == "cuda"

    def seconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Return the median seconds of `call`, the device's work included."""
        times = []
        for _ in range(1 if self.tiny else repeats + 3):
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - started)
        return median(times[-repeats:])

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.gpu:
            torch.cuda.synchronize(self.device)


def network(place: Place, model: str, precision: str = "float32") -> ModuleNet:
    """Return a network of `model` with its initial weights; settings of the device's arithmetic are those of a run."""
    text = model.startswith("lstm")
    task: Any = SimpleNamespace(name="made up", shape=(80,) if text else (3, 32, 32), classes=10, vocabulary=80)
    net = ModuleNet(create(model, settings_class("model", model)(), task, 1), place.device, precision)
    set_arithmetic(place.device, settings(precision=precision))
    return net


def settings(**changes: Any) -> Train:
    """Return the optimiser's settings of the papers, one epoch."""
    return Train(**({"lr": 0.01, "momentum": 0.5, "epochs": 1, "batch": BATCH} | changes))


def visit(net: ModuleNet, client: int, examples: int, *, text: bool = False) -> Visit:
    """Return the visit of a client with random `examples`."""
    generator = torch.Generator().manual_seed(client)
    y = torch.randint(10, (examples,), generator=generator)
    words = Inputs(torch.randint(80, (examples, 80), generator=generator).to(net.device))
    values: Found = {"extras": {}, "config": {}, "state": {}, "round": 1, "rounds": 1, "seed": 1, "classes": 10}
    return Visit(
        net=net,
        params={name: p.detach().clone() for name, p in net.params.items()},
        buffers={name: b.clone() for name, b in net.buffers.items()},
        inputs=words if text else pictures(net, examples, client),
        y=y.to(net.device),
        client=client,
        lr=0.01,
        **values,
    )


def pictures(net: ModuleNet, count: int, number: int = 0, *, last: bool = True) -> Inputs:
    """Return random pictures as they lie on the device of `net`, as bytes; `last`: with channels last."""
    generator = torch.Generator().manual_seed(1000 + number)
    held = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8).to(net.device)
    return Inputs(net.arrange(held) if last else held, Prepare(NORMALISE, 4, net.device))


def smoke(place: Place) -> Found:
    """Every method, sequential and batched; every kind of model; weights of an LSTM stay in the flat row."""
    from fedcross.conf.compose import CONF

    methods = ["fedcross"] if place.tiny else sorted(p.stem for p in (CONF / "method").glob("*.yaml"))
    found: Found = {}
    for method in methods:
        for engine in ("local", "batched"):
            found[f"{method} {engine}"] = tried(partial(_one_round, place, method, engine))
    for model in ("lenet5",) if place.tiny else ("lenet5", "resnet20", "vgg16_bn", "resnet18", "cnn_w", "lstm"):
        found[model] = tried(partial(_both_trainers, place, model))
    images = torch.randn(8, 3, 32, 32, device=place.device)
    augment = build(Augment(crop=4, flip=True, rotate=15, resized_crop=True))
    if augment is not None:
        found["augmentation"] = tried(lambda: list(augment(images, torch.Generator().manual_seed(1)).shape))
    return found


def _one_round(place: Place, method: str, engine: str) -> str:
    from fedcross import run

    own = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
    sizes = ["rounds=1", "partition.clients=6", "clients_per_round=3", "train.epochs=1"]
    draw = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        x, y = draw.integers(0, 256, (250, 8, 8), np.uint8), draw.integers(0, 10, 250)
        np.savez(f"{folder}/data.npz", x=x, y=y)
        run(
            f"method={method}",
            "task=arrays",
            f"task.root={folder}",
            f"engine={engine}",
            f"device={place.device}",
            f"output={folder}/run",
            "logger=none",
            *own,
            *sizes,
        )
    return "ran"


def _both_trainers(place: Place, model: str) -> Found:
    """Train two clients in both trainers, with and without recorded steps; return the largest difference of a weight.

    `load` checks the views of an LSTM. Without a GPU a recorded step is a called one.
    """
    net = network(place, model)
    start = {name: array.copy() for name, array in net.read().items()}
    text, objective, record = model.startswith("lstm"), Objective(Settings()), None if place.gpu else _called
    clients = [visit(net, i, 2 * BATCH + 20, text=text) for i in range(2)]
    works = [
        Work(one, {}, {n: s.to(place.device) for n, s in dropout_states(net.module, 1).items()}) for one in clients
    ]
    captured, together = Captured(net, objective, record=record), Together(net, objective, record=record)
    plain = _one_by_one(net, start, works, partial(train, net, objective))
    # Twice: what is recorded and compared in the first pass is only repeated in the second.
    found = {
        "batched": train_batched(net, objective, works, settings()),
        "captured": [_one_by_one(net, start, works, captured.train) for _ in range(2)][1],
        "batched, captured": [train_batched(net, objective, works, settings(), together=together) for _ in range(2)][1],
    }
    apart = {
        name: max(float((a.flat - b.flat).abs().max()) for a, b in zip(plain, other, strict=True))
        for name, other in found.items()
    }
    return {"apart": apart, "refused": {"captured": captured.refused, "batched, captured": together.refused}}


def _called(call: Callable[[], None]) -> Callable[[], None]:
    """Take the place of recording a step."""
    return call


def _one_by_one(
    net: ModuleNet, start: dict[str, Any], works: Sequence[Work], trainer: Callable[..., Trained]
) -> list[Trained]:
    found = []
    for work in works:
        net.load(start)
        for name, state in work.dropout.items():
            net.module.get_buffer(name).copy_(state)
        trained = trainer(work.visit, work.prepared, settings())
        found.append(replace(trained, flat=trained.flat.clone()))
        net.logits(net.params, net.buffers, work.visit.x, train=False)
    return found


def accuracy(place: Place) -> Found:
    """Weights after one epoch: the device against the CPU, with and without TF32, and the device against itself.

    And whether it prepares every value of a byte as the CPU does.
    """
    raw = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 3, 1, 1)
    held = Inputs(torch.from_numpy(raw).to(place.device), Prepare(NORMALISE, 4, place.device))
    found: Found = {"bytes prepared as on the CPU": bool(torch.equal(held[:].cpu(), NORMALISE(raw)))}
    for model in ("lenet5",) if place.tiny else ("lenet5", "resnet20", "lstm"):
        exact = _trained(Place(torch.device("cpu"), place.tiny), model, "float32")
        for precision in ("float32", "tf32", "bfloat16"):
            one, two = (_trained(place, model, precision) for _ in range(2))
            apart = float((one - exact).abs().max())
            found[f"{model} {precision}"] = {"from CPU": apart, "same twice": bool(torch.equal(one, two))}
    return found


def _trained(place: Place, model: str, precision: str) -> Tensor:
    net = network(place, model, precision)
    one = visit(net, 0, 60 if place.tiny else 500, text=model.startswith("lstm"))
    return train(net, Objective(Settings()), one, {}, settings(precision=precision)).flat.detach().cpu().clone()


def stepper(place: Place, model: str, precision: str = "float32", *, last: bool = True) -> Callable[[], None]:
    """Return one step of the sequential trainer on fixed tensors; `last`: images with channels last."""
    net = network(place, model, precision)
    inputs, rows = pictures(net, 10 * BATCH, last=last), torch.arange(BATCH, device=place.device)
    y = torch.randint(10, (BATCH,), device=place.device)
    momentum, chosen = torch.zeros_like(net.flat), settings(precision=precision)

    def one() -> None:
        net.gradient.zero_()
        scores = net.logits(net.params, net.buffers, inputs[rows])
        functional.cross_entropy(scores, y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            step(net.flat, net.gradient, momentum, 0.01, chosen)

    return one


def graphs(place: Place) -> Found:
    """Seconds to record a step, the memory after each of 20 rounds of both trainers with graphs, and why if refused."""
    if not place.gpu:
        return {"skipped": "graphs need a GPU"}
    one, started = stepper(place, "lenet5"), time.perf_counter()
    record_cuda(one)
    place.wait()
    found: Found = {"seconds a recording": time.perf_counter() - started, "reserved, MB": []}
    net = network(place, "lenet5")
    start, captured = {n: a.copy() for n, a in net.read().items()}, Captured(net, Objective(Settings()), 130)
    works = [Work(visit(net, i, 130), {}, {}) for i in range(CLIENTS)]
    together = Together(net, Objective(Settings()), 130)
    for _ in range(20):
        train_batched(net, Objective(Settings()), works, settings(), together=together)
        _one_by_one(net, start, works, captured.train)
        found["reserved, MB"].append(torch.cuda.memory_reserved(place.device) / 1e6)
    return found | {"refused": {"captured": captured.refused, "batched": together.refused}}


def steps(place: Place) -> Found:
    """Milliseconds of a client's step: eager, captured, several streams; a batched round, eager and with graphs."""
    found: Found = {}
    for model in ("lenet5",) if place.tiny else ("lenet5", "resnet20", "vgg16_bn"):
        for precision in ("float32",) if place.tiny else ("float32", "tf32", "bfloat16"):
            for last in (True,) if place.tiny else (True, False):
                name = f"{model} {precision} {'NHWC' if last else 'NCHW'}"
                found[name] = tried(partial(_step_times, place, model, precision, last))
        found[f"{model} batched"] = tried(partial(_batched_times, place, model))
    return found


def _step_times(place: Place, model: str, precision: str, last: bool) -> Found:
    one = stepper(place, model, precision, last=last)
    found: Found = {"eager": place.seconds(one) * 1e3}
    if place.gpu:
        found["captured"] = place.seconds(record_cuda(one)) * 1e3
        for count in (2, 4, 8):
            found[f"{count} streams"] = place.seconds(_streams(place, model, precision, count)) * 1e3 / count
    return found


def _streams(place: Place, model: str, precision: str, count: int) -> Callable[[], None]:
    """Return a call that replays `count` captured steps, each on a stream of its own."""
    replays = [record_cuda(stepper(place, model, precision)) for _ in range(count)]
    streams = [torch.cuda.Stream(place.device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def all_of_them() -> None:
        for replay, stream in zip(replays, streams, strict=True):
            with torch.cuda.stream(stream):
                replay()

    return all_of_them


def _batched_times(place: Place, model: str) -> Found:
    net, examples = network(place, model), BATCH * (1 if place.tiny else 10)
    works = [Work(visit(net, i, examples), {}, {}) for i in range(2 if place.tiny else CLIENTS)]
    found: Found = {}
    recorded = Together(net, Objective(Settings()), examples) if place.gpu else None
    for name, together in (("vmap", None), ("vmap + graph", recorded)):
        call = partial(train_batched, net, Objective(Settings()), works, settings(), together=together)
        whole = place.seconds(call, 3)
        found[name] = whole * 1e3 / len(works) / (examples / BATCH)
    return found


def convolutions(place: Place) -> Found:
    """Milliseconds of a convolution for ten clients, forward and backward: grouped (as vmap does), and one by one."""
    clients, width, size = (2, 4, 8) if place.tiny else (CLIENTS, 32, 16)
    x = torch.randn(BATCH, clients * width, size, size, device=place.device, requires_grad=True)
    w = torch.randn(clients * width, width, 3, 3, device=place.device, requires_grad=True)
    slope = torch.randn(BATCH, clients * width, size, size, device=place.device)

    def grouped(*, backward: bool) -> None:
        out = functional.conv2d(x, w, padding=1, groups=clients)
        if backward:
            torch.autograd.grad(out, (x, w), slope)

    def looped(*, backward: bool) -> None:
        for part, kernel, own in zip(x.chunk(clients, 1), w.chunk(clients), slope.chunk(clients, 1), strict=True):
            out = functional.conv2d(part, kernel, padding=1)
            if backward:
                torch.autograd.grad(out, (part, kernel), own)

    calls = {"grouped": grouped, "looped": looped}
    return {
        f"{name}, {'all three passes' if backward else 'forward'}": place.seconds(partial(call, backward=backward))
        * 1e3
        for name, call in calls.items()
        for backward in (False, True)
    }


def transfers(place: Place) -> Found:
    """Milliseconds to load a model, read it, bring a client's data and score 1000 examples."""
    found: Found = {}
    for model in ("lenet5",) if place.tiny else ("lenet5", "resnet20", "vgg16_bn"):
        net = network(place, model)
        arrays = {name: array.copy() for name, array in net.read().items()}
        held = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8)
        images = torch.randn(10 if place.tiny else 1000, 3, 32, 32).to(place.device)
        with torch.no_grad():
            found[model] = {
                "load": place.seconds(partial(net.load, arrays)) * 1e3,
                "upload": place.seconds(net.read) * 1e3,
                "data": place.seconds(partial(held.to, place.device)) * 1e3,
                "data as float32": place.seconds(partial(held.float().to, place.device)) * 1e3,
                "evaluation": place.seconds(
                    partial(net.logits, net.params, net.buffers, images, train=False), repeats=5
                )
                * 1e3,
            }
    return found


def processes(place: Place) -> Found:
    """Milliseconds of a LeNet-5 step in 1, 4 and 10 processes that share the device."""
    found: Found = {}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", str(place.device), "--worker"]
    for count in (1,) if place.tiny else (1, 4, 10):
        running = [
            subprocess.Popen([*command, *(["--tiny"] if place.tiny else [])], stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        found[str(count)] = [float(one.communicate()[0].split()[-1]) for one in running]
    return found


def trace(place: Place) -> Found:
    """The ten dearest operations of three steps, and the number of operator calls in a step."""
    from torch.profiler import ProfilerActivity, profile

    one = stepper(place, "lenet5" if place.tiny else "resnet20")
    one()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.gpu else [])]
    with profile(activities=kinds) as seen:
        for _ in range(3):
            one()
        place.wait()
    rows = [(e.key, e.count, e.self_device_time_total or e.self_cpu_time_total) for e in seen.key_averages()]
    dearest = sorted(rows, key=lambda row: -row[2])[:10]
    return {"calls a step": sum(row[1] for row in rows) / 3, "dearest, us": [[k, c, t] for k, c, t in dearest]}


#: In the order of their use: what may not run at all comes before what may be slow.
ITEMS: dict[str, Callable[[Place], Found]] = {
    one.__name__: one for one in (smoke, accuracy, graphs, steps, convolutions, transfers, processes, trace)
}


def tried(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, or its error in words: one item's fault must not end the others."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the error is the finding
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def measure(place: Place, names: Sequence[str], file: Path) -> Found:
    """Run the items `names`, write `file` after each, and return everything."""
    machine = torch.cuda.get_device_name(place.device) if place.gpu else "CPU"
    found: Found = {"machine": machine, "torch": torch.__version__, "tiny": place.tiny, "items": {}}
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        started = time.perf_counter()
        result = tried(partial(ITEMS[name], place))
        found["items"][name] = {"seconds": round(time.perf_counter() - started, 2), "found": result}
        file.write_text(json.dumps(found, indent=1))
        print(name, json.dumps(found["items"][name]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> Found:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(ITEMS), help="an item; may be given several times")
    parser.add_argument("--device", default="auto", help="as the run's device: auto, cuda:1, cpu")
    parser.add_argument("--tiny", action="store_true", help="one repetition of the smallest sizes: tries the program")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu.json"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    place = Place(pick_device(chosen.device), chosen.tiny)
    if chosen.worker:
        print(place.seconds(stepper(place, "lenet5"), 200) * 1e3)
        return {}
    return measure(place, chosen.only or list(ITEMS), chosen.output)


if __name__ == "__main__":
    main()
