"""Whole rounds on an emulated GPU: every method and every model, on both trainers, equal to the CPU to the bit."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fedcross.client import trainer, workshop
from fedcross.client.app import app as client_app
from fedcross.client.app import together
from fedcross.client.captured import Captured
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.compose import CONF, join
from fedcross.conf.schema import settings_class
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.server.session import Session
from fedcross.strategies.fedgen import FedGen
from fedcross.strategies.flwr import MU
from fedcross.strategies.parts.generator import create as create_generator
from fedcross.strategies.parts.objective import Batch, Objective, as_arrays
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.registry import method_class
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models import create
from fedcross.tasks.models.dropout import seed_dropout
from tests.support import visits
from tests.support.emulated_gpu import Counted, emulated_gpu
from tests.support.federation import Quiet, run, same, settle

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
TINY = ("rounds=2", "task.limit=72", "task.limit_test=24", "train.batch=8", "train.epochs=2", "partition.clients=6")


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Counted:
    """Run a federation on the CPU and on the emulated GPU; assert that the models are equal and nothing was dropped."""
    monkeypatch.delenv("FEDCROSS_DEVICE", raising=False)
    plain = run(folder / "cpu", *TINY, "device=cpu", *overrides).method.global_model()
    with emulated_gpu(monkeypatch) as counted:
        _no_waits_in_a_step(monkeypatch, counted)
        found = run(folder / "gpu", *TINY, "device=cuda", *overrides).method.global_model()
    lines = [json.loads(line) for line in (folder / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert [line["dropped"] for line in lines] == [0, 0]
    assert counted.recorder.replays > counted.recorder.recordings > 0
    assert same(plain, found)
    return counted


def _no_waits_in_a_step(monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    """Assert that the host never waits for the GPU in a step, called or recorded; the recorder refuses the latter."""
    real = trainer.Stepper.advance

    def watched(*arguments: Any) -> None:
        before = len(counted.waits)
        real(*arguments)
        assert counted.waits[before:] == []

    monkeypatch.setattr(trainer.Stepper, "advance", watched)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    model = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
    both(tmp_path, monkeypatch, f"method={method}", "evaluate_local=true", *model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("train.examples=9", "compression.up=int8", "compression.down=int8", "train.clip=1"),
        ("train.only=[classifier.*]",),
        ("+task.augment={flip: true, crop: 1}",),
        ("partition=dirichlet", "partition.beta=0.1", "task.limit=200"),
        ("method=fedct", "+method.host_epochs=3"),
    ],
    ids=["part of the examples", "part of the model", "augmentation", "unequal clients", "other epochs at a host"],
)
def test_other_settings_train_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    both(tmp_path, monkeypatch, *settings)


@pytest.mark.slow
def test_a_site_without_recorded_steps_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDCROSS_DEVICE", raising=False)
    monkeypatch.setenv("FEDCROSS_GRAPHS", "off")
    plain = run(tmp_path / "cpu", *TINY, "device=cpu").method.global_model()
    with emulated_gpu(monkeypatch) as counted:
        found = run(tmp_path / "gpu", *TINY, "device=cuda").method.global_model()
    assert counted.recorder.recordings == 0
    assert same(plain, found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedgen", "scaffold"])
def test_a_whole_round_trains_together_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Without recorded steps equal to the CPU to the bit; recorded ones pad all batches, so sums differ in rounding."""

    def finished(folder: str, device: str, *, graph: bool = False) -> Any:
        config, settled = settle(tmp_path / folder, *TINY, f"method={method}", f"device={device}")
        workshop._open.clear()
        grid = BatchedGrid(client_app, 6, {"overrides": join(settled)}, together, Params(cuda_graph=graph))
        session = Session(config, grid, Quiet())
        session.execute()
        return session.method.global_model()

    monkeypatch.delenv("FEDCROSS_DEVICE", raising=False)
    plain = finished("cpu", "cpu")
    with emulated_gpu(monkeypatch) as counted:
        called = finished("gpu", "cuda")
        assert counted.recorder.recordings == 0
        recorded = finished("graph", "cuda", graph=True)
        assert counted.recorder.replays > counted.recorder.recordings > 0
    assert same(plain, called)
    for name, array in plain.items():
        np.testing.assert_allclose(recorded[name], array, rtol=0, atol=1e-5, err_msg=name)


#: File in conf/model -> shape of one example, as small as it takes; one number is a text's length.
MODELS: dict[str, tuple[int, ...]] = {
    "mlp": (1, 4, 4),
    "lenet5": (3, 32, 32),
    "cnn_w": (3, 32, 32),
    "cnn_femnist": (1, 28, 28),
    "vgg_femnist": (1, 14, 14),
    "vgg16_bn": (3, 32, 32),
    "resnet20": (3, 8, 8),
    "resnet20_lab": (3, 32, 32),
    "resnet18": (3, 8, 8),
    "torchvision": (3, 32, 32),
    "fedfusion_cifar": (3, 24, 24),
    "fedfusion_mnist": (1, 28, 28),
    "fedfusion_mnist_paper": (1, 28, 28),
    "lstm": (5,),
    "lstm_sent140": (5,),
    "own": (1, 4, 4),
}
CLASSES = 4


class Own(nn.Module):
    """A network of a user, with torch's own dropout and a normalisation of vectors."""

    embedding = 16

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.classifier = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(x))
        return scores


def made(model: str) -> nn.Module:
    """Return the network of the file `model`."""
    shape, values = MODELS[model], group("model", model)
    module = values.pop("module", model)
    values |= {"path": f"{__name__}:Own"} if model == "own" else {}
    task: Any = SimpleNamespace(name="made up", shape=shape, classes=CLASSES, vocabulary=7 if len(shape) == 1 else None)
    return create(module, settings_class("model", module)(**values), task, 1)


def group(kind: str, name: str) -> dict[str, Any]:
    """Return the settings in a file of conf/, with those that it takes over; without the run's own names."""
    found = yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())
    values: dict[str, Any] = {}
    for parent in found.pop("defaults", []):
        values |= {"module": parent, **group(kind, parent)} if parent != "_self_" and isinstance(parent, str) else {}
    return values | {key: value for key, value in found.items() if key != "name" and "${" not in str(value)}


def test_no_model_is_left_out() -> None:
    assert set(MODELS) == {path.stem for path in (CONF / "model").glob("*.yaml")}


def examples(model: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and labels."""
    generator, shape = torch.Generator().manual_seed(2), (count, *MODELS[model])
    x = torch.randint(7, shape, generator=generator) if len(shape) == 2 else torch.randn(shape, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_trains_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Two visits with recorded steps and a short batch, an evaluation between them, against the plain loop on a CPU."""
    with workshop.one_thread(torch.device("cpu")):
        plain = _trained(model, torch.device("cpu"))
    with emulated_gpu(monkeypatch) as counted:
        found = _trained(model, torch.device("cuda:0"))
    assert (counted.recorder.recordings, counted.recorder.replays) == (1, 3)
    for name, array in plain.items():  # an LSTM's fused kernel on the CPU sums in another order
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6 if "lstm" in model else 0, err_msg=name)


def _trained(model: str, device: torch.device) -> dict[str, Any]:
    net, objective = ModuleNet(made(model), device), Objective(Settings())
    x, y = examples(model, 8)
    start = {name: array.copy() for name, array in net.read().items()}
    train = Captured(net, objective).train if device.type == "cuda" else partial(trainer.train, net, objective)
    for _ in range(2):
        net.load(start)
        seed_dropout(net.module, 5)
        one = visits.visit(net, 0, 8, inputs=Inputs(net.arrange(x.to(device))), y=y.to(device), classes=CLASSES)
        train(one, {}, visits.settings(epochs=1, batch=3))
        net.logits(net.params, net.buffers, one.x, train=False)
    return {name: array.copy() for name, array in net.read().items()}


#: A model that a method refuses, with the words of its error.
REFUSED = re.compile("needs a model with|needs model=fedfusion|has no extractor|extractor")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_every_method_can_be_recorded(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """For each method: no mixed devices and nothing for which the host waits; the recorder refuses both."""
    x, y = examples(model, 2)
    recorded: set[str] = set()
    with emulated_gpu(monkeypatch) as counted:
        nets: dict[Any, ModuleNet] = {}
        for objective, kind, settings in objectives():
            try:
                net = suited(kind, settings, model, nets)
            except ConfigError as error:
                if not REFUSED.search(str(error)):
                    raise
                continue
            _record_a_step(net, objective, x, y, counted)
            recorded.add(type(objective).__name__)
    everywhere = {type(one).__name__ for one, kind, _ in objectives() if not kind.halves} - {"Fusion"}
    assert recorded >= everywhere | ({"Fusion"} if model.startswith("fedfusion") else set())


def objectives() -> list[tuple[Objective, Any, Settings]]:
    """Return the client's part of every method once, with its class and settings; many have the base class."""
    found: dict[Any, tuple[Objective, Any, Settings]] = {}
    for name in METHODS:
        values = group("method", name)
        kind = method_class(values.pop("module", name))
        settings = kind.Params(**{key: value for key, value in values.items() if key in kind.Params.model_fields})
        key = kind.Objective, repr(settings) if kind.Objective is not Objective else "", kind.halves
        found.setdefault(key, (kind.Objective(settings), kind, settings))
    return list(found.values())


def suited(kind: Any, settings: Settings, model: str, nets: dict[Any, ModuleNet]) -> ModuleNet:
    """Return the net that a method trains, one for all methods that take the model as it is."""
    changed = kind.build_model.__func__ is not Method.build_model.__func__
    key = (kind, repr(settings)) if changed else "as it is"
    if key not in nets:
        nets[key] = ModuleNet(kind.network(made(model), settings, 1), torch.device("cuda:0"))
    net = nets[key]
    head = net.params.get("classifier.weight")
    if issubclass(kind, FedGen) and head is None:
        raise ConfigError("needs a model with classifier.weight")  # FedGen.setup says so on the server
    return net


def _record_a_step(net: ModuleNet, objective: Objective, x: torch.Tensor, y: torch.Tensor, counted: Counted) -> None:
    embedding = getattr(net.module, "embedding", 1)
    rows = np.random.default_rng(1).normal(size=(CLASSES, embedding)).astype(np.float32)
    params = {name: np.zeros(tuple(p.shape), np.float32) for name, p in net.params.items()}
    one = visits.visit(
        net,
        0,
        2,
        inputs=Inputs(net.arrange(x.to(net.device))),
        y=y.to(net.device),
        classes=CLASSES,
        exchange=1,
        config={MU: 0.1},
        state=params if objective.keeps else {},
        extras={
            "control": params,
            "generator": as_arrays(create_generator(getattr(objective.params, "noise", 100), CLASSES, 8, embedding, 1)),
            "known": {"labels": np.ones(CLASSES, np.uint8)},
            "prototypes": {"mean": rows, "vectors": rows, "present": np.ones(CLASSES, bool)},
        },
    )
    prepared = objective.prepare(one)
    momentum, total = torch.zeros_like(net.flat), net.flat.new_zeros(())
    settings = visits.settings(batch=2)
    stepper = trainer.Stepper(net, objective, prepared, settings, momentum, total, net.flat.new_zeros(()))
    batch = Batch(one.x, one.y, rows=torch.arange(2).to(net.device), step=one.y.new_zeros(()))
    before = len(counted.waits)
    counted.recorder(lambda: stepper.advance(batch))
    assert counted.waits[before:] == []
    assert bool((momentum != 0).any())


def test_a_model_crosses_in_one_piece_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, statistics of batch normalisation, and the counter of its batches; two types on the way back."""
    plain = visits.small_net(norm=True)
    arrays = {name: np.array(array) + np.array(1, array.dtype) for name, array in plain.read().items()}
    with emulated_gpu(monkeypatch) as counted:
        net = ModuleNet(plain.module, torch.device("cuda:0"))
        counted.waits.clear()
        net.load(arrays)
        assert counted.waits == ["copy_ to cuda", "_to_copy to cuda", "_to_copy to cuda"]
        found = net.read()
        assert counted.waits[3:] == ["_to_copy to cpu", "_to_copy to cpu"]
    assert same(arrays, found)
