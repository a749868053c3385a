"""One method, every kind of model, then every method, sequential and batched; weights stay in the flat row."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.place import BATCH, Place, network, settings, visit
from benchmarks.gpu.report import Found, Lines
from fedcross.client import workshop
from fedcross.client.batched.captured import Together
from fedcross.client.batched.state import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.captured import Captured
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.compose import CONF
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective, Trained
from fedcross.tasks.augment import Augment, build
from fedcross.tasks.models.dropout import dropout_states

#: Two rounds, because some methods begin in the second; a visit has some 12 full batches, of which most are replayed.
SIZES = (
    *("rounds=2", "partition.clients=6", "clients_per_round=3", "train.epochs=3", "train.batch=8"),
    *("logger=none", "task=arrays"),
)
FIRST = "fedcross"
#: The one most in doubt comes second: cuDNN's LSTM in a graph.
MODELS = ("lenet5", "lstm", "resnet20", "cnn_w", "vgg16_bn", "resnet18")


def measure(place: Place, line: Lines) -> None:
    """Write a line for one method on both engines, each model, recurrent layers, augmentation; then other methods."""
    _on_both_engines(place, line, FIRST)
    for model in MODELS[:1] if place.tiny else MODELS:
        line(model, partial(both_trainers, place, model))
    line("recurrent layers", partial(_recurrent, place))
    line("augmentation", partial(_augmented, place))
    for method in [] if place.tiny else sorted(p.stem for p in (CONF / "method").glob("*.yaml")):
        _on_both_engines(place, line, method)


def _on_both_engines(place: Place, line: Lines, method: str) -> None:
    for engine in ("engine=local engine.workers=1", "engine=batched"):
        line(f"{method} {engine.split()[0]}", partial(two_rounds, place, method, engine.split()))


def two_rounds(place: Place, method: str, engine: Sequence[str]) -> Found:
    """Run `method`; return whether its steps were recorded, how many were replayed, and why not.

    On the local engine, where the order of all replies is fixed, also how far its model is from the CPU's.

    Raises
    ------
    RuntimeError
        If a visit was lost; the log says why.
    """
    expected = _ran(method, engine, "cpu")[0] if engine[0] == "engine=local" else {}
    model, recorders = _ran(method, engine, str(place.device))
    apart = [float(np.abs(model[name] - array).max()) for name, array in expected.items() if array.size]
    return replayed(recorders, place) | ({"from CPU": max(apart)} if apart else {})


def _ran(method: str, engine: Sequence[str], device: str) -> tuple[dict[str, Any], list[Any]]:
    """Run `method` on `device`; return its model, and what recorded its steps."""
    from fedcross import run

    own = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
    own += ["method.generator_steps=3"] if method.startswith("fedgen") else []
    draw = np.random.default_rng(1)
    workshop._close()  # gives the graphs of the run before back, at once
    with tempfile.TemporaryDirectory() as folder:
        x, y = draw.integers(0, 256, (250, 8, 8), np.uint8), draw.integers(0, 10, 250)
        np.savez(f"{folder}/data.npz", x=x, y=y)
        where = [f"task.root={folder}", f"device={device}", f"output={folder}/run"]
        finished = run(f"method={method}", *engine, *SIZES, *where, *own)
        model = {name: tensor.double().numpy() for name, tensor in finished.model.state_dict().items()}
        rounds = [json.loads(row) for row in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    if lost := sum(int(row.get("dropped") or 0) for row in rounds):
        raise RuntimeError(f"{lost} visits were lost, see the log")
    return model, [recorder for shop in workshop._open.values() for recorder in shop.recorders]


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
    """Train two clients in both trainers, with and without recorded steps; return the largest difference of a weight.

    `load` checks the views of an LSTM. Without a GPU a recorded step is a called one.
    """
    net = network(place, model)
    start = {name: array.copy() for name, array in net.read().items()}
    text, objective, record = model.startswith("lstm"), Objective(Settings()), None if place.gpu else _called
    clients = [visit(net, i, 4 * BATCH + 20, text=text) for i in range(2)]
    works = [
        Work(one, {}, {n: s.to(place.device) for n, s in dropout_states(net.module, 1).items()}) for one in clients
    ]
    captured, together = Captured(net, objective, record=record), Together(net, objective, record=record)
    plain = one_by_one(net, start, works, partial(train, net, objective))
    # Twice: what is recorded and compared in the first pass is only repeated in the second.
    found = {
        "batched": train_batched(net, objective, works, settings()),
        "captured": [one_by_one(net, start, works, captured.train) for _ in range(2)][1],
        "batched, captured": [train_batched(net, objective, works, settings(), together=together) for _ in range(2)][1],
    }
    apart = {
        name: max(float((a.flat - b.flat).abs().max()) for a, b in zip(plain, other, strict=True))
        for name, other in found.items()
    }
    return {
        "apart": apart,
        "captured": replayed([captured], place),
        "batched, captured": replayed([together], place),
    }


def _called(call: Callable[[], None]) -> Callable[[], None]:
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


def _recurrent(place: Place) -> Found:
    """Return in which type the LSTM gives its result, for each type asked for: cuDNN's autocast makes float16 of it."""
    found = {}
    for precision in ("float32", "bfloat16"):
        net = network(place, "lstm", precision)
        kinds: set[str] = set()
        for part in net.module.modules():
            if isinstance(part, torch.nn.RNNBase):
                part.register_forward_hook(lambda _, __, out, kinds=kinds: kinds.add(str(out.dtype)))
        net.logits(net.params, net.buffers, visit(net, 0, 4, text=True).x)
        found[precision] = ", ".join(sorted(kinds)).removeprefix("torch.")
    return found


def _augmented(place: Place) -> list[int]:
    augment = build(Augment(crop=4, flip=True, rotate=15, resized_crop=True))
    assert augment is not None
    images = torch.randn(8, 3, 32, 32, device=place.device)
    return list(augment(images, torch.Generator().manual_seed(1)).shape)
