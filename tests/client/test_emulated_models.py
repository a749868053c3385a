"""Every model on an emulated GPU: equal to the CPU to the bit, and a step of it with every method can be recorded."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fedcross.client import trainer, workshop
from fedcross.client.captured import Captured
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.compose import CONF
from fedcross.conf.schema import settings_class
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.fedgen import FedGen
from fedcross.strategies.flwr import MU
from fedcross.strategies.parts.generator import create as create_generator
from fedcross.strategies.parts.objective import Batch, Objective, Visit, as_arrays
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.registry import method_class
from fedcross.tasks.inputs import Inputs
from fedcross.tasks.models import create, pooling
from fedcross.tasks.models.dropout import seed_dropout
from fedcross.tasks.reading.params import Normalise, token_ids
from tests.support import visits
from tests.support.emulated_gpu import Counted, emulated_gpu
from tests.support.scale import WHOLE

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
#: File in conf/model -> shape of one example, as small as it takes; one number is a text's length.
MODELS: dict[str, tuple[int, ...]] = {
    "mlp": (1, 4, 4),
    "lenet5": (3, 32, 32),
    "cnn_w": (3, 32, 32),
    "cnn_femnist": (1, 28, 28),
    "vgg_femnist": (1, 14, 14),
    "vgg16_bn": (3, 32, 32),
    "resnet20": (3, 8, 8),
    "resnet20_lab": (3, 8, 8),
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
#: Without ``FEDCROSS_RELIABILITY=whole`` left out of the test of every method: another of MODELS has the same layers or
#: calls the same operations of torch in a step and an evaluation (`lenet5` and `torchvision`; compared on 2026-11-25).
ALIKE = ("fedfusion_mnist_paper", "lstm_sent140", "cnn_w", "cnn_femnist", "resnet18")
#: Models of which a layer of 64 and more channels has a 16th of them: all that their width changes here is the time.
NARROW = ("vgg16_bn", "vgg_femnist", "resnet18", "torchvision")
#: How pictures are prepared.
NORMALISE = Normalise((0.5,), (0.25,), 255.0)


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
    return copy.deepcopy(_made(model))


@cache
def _made(model: str) -> nn.Module:
    shape, values = MODELS[model], group("model", model)
    module = values.pop("module", model)
    values |= {"path": f"{__name__}:Own"} if model == "own" else {}
    task: Any = SimpleNamespace(name="made up", shape=shape, classes=CLASSES, vocabulary=7 if len(shape) == 1 else None)
    whole = create(module, settings_class("model", module)(**values), task, 1)
    return narrowed(whole) if model in NARROW else whole


def narrowed(network: nn.Module) -> nn.Module:
    """Return `network` with a 16th of the channels in each layer that has 64 or more, and new weights."""

    def few(channels: int) -> int:
        return channels // 16 if channels >= 64 else channels

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        for name, old in list(network.named_modules()):
            new: nn.Module
            if isinstance(old, nn.Conv2d):
                rest: Any = (
                    old.kernel_size,
                    old.stride,
                    old.padding,
                    old.dilation,
                    few(old.groups),
                    old.bias is not None,
                )
                new = nn.Conv2d(few(old.in_channels), few(old.out_channels), *rest)
            elif isinstance(old, nn.BatchNorm2d):
                new = nn.BatchNorm2d(few(old.num_features), old.eps, old.momentum)
            elif isinstance(old, nn.Linear):
                new = nn.Linear(few(old.in_features), few(old.out_features))
            else:
                continue
            network.set_submodule(name, new)
    network.embedding = network.get_submodule("classifier").in_features
    if getattr(network, "extractor_channels", 0):
        network.extractor_channels = few(network.extractor_channels)  # type: ignore[arg-type, assignment]
    return network


def group(kind: str, name: str) -> dict[str, Any]:
    """Return the settings in a file of conf/, with those that it takes over; without the run's own names."""
    found = yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())
    values: dict[str, Any] = {}
    for parent in found.pop("defaults", []):
        values |= {"module": parent, **group(kind, parent)} if parent != "_self_" and isinstance(parent, str) else {}
    return values | {key: value for key, value in found.items() if key != "name" and "${" not in str(value)}


def test_no_model_is_left_out() -> None:
    assert set(MODELS) == {path.stem for path in (CONF / "model").glob("*.yaml")}


def examples(model: str, count: int, net: ModuleNet) -> tuple[Inputs, torch.Tensor]:
    """Return random inputs and labels on the device of `net`: pictures, or tokens."""
    draw, shape = np.random.default_rng(2), (count, *MODELS[model])
    text = len(shape) == 2
    raw = draw.integers(7, size=shape) if text else draw.integers(256, size=shape, dtype=np.uint8)
    inputs = Inputs.of(raw, token_ids if text else NORMALISE, net.device)
    y = torch.from_numpy(draw.integers(CLASSES, size=count))
    return inputs.like(net.arrange(inputs.held)), y.to(net.device)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_trains_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Two visits with recorded steps and a short batch, an evaluation between them, against the plain loop on a CPU."""
    monkeypatch.setattr(pooling, "_plain", lambda *_: False)  # torch's way back on the CPU too
    with workshop.one_thread(torch.device("cpu")):
        plain = _trained(model, torch.device("cpu"))
    with emulated_gpu(monkeypatch) as counted:
        found = _trained(model, torch.device("cuda:0"))
    assert (counted.recorder.recordings, counted.recorder.replays) == (1, 3)
    for name, array in plain.items():  # an LSTM's fused kernel on the CPU sums in another order
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6 if "lstm" in model else 0, err_msg=name)


def _trained(model: str, device: torch.device) -> dict[str, Any]:
    net, objective = ModuleNet(made(model), device), Objective(Settings())
    inputs, y = examples(model, 8, net)
    assert (inputs.held.dtype == torch.uint8) == (device.type == "cuda" and len(MODELS[model]) == 3)
    start = {name: array.copy() for name, array in net.read().items()}
    train = Captured(net, objective).train if device.type == "cuda" else partial(trainer.train, net, objective)
    for _ in range(2):
        net.load(start)
        seed_dropout(net.module, 5)
        one = visits.visit(net, 0, 8, inputs=inputs, y=y, classes=CLASSES)
        train(one, {}, visits.settings(epochs=1, batch=3))
        net.logits(net.params, net.buffers, one.x, train=False)
    return {name: array.copy() for name, array in net.read().items()}


#: A model that a method refuses, with the words of its error.
REFUSED = re.compile("needs a model with|needs model=fedfusion|has no extractor|extractor")


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if WHOLE or model not in ALIKE])
def test_a_step_of_every_method_can_be_recorded(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """For each method: no mixed devices, and nothing for which the host waits; the recorder refuses both.

    And with ``train.deterministic``, nothing without an algorithm that repeats itself.
    """
    plain = made(model)
    trained = [(kind.Objective(settings), suited(kind, settings, model, plain)) for kind, settings in kinds()]
    recorded: set[str] = set()
    with emulated_gpu(monkeypatch) as counted, deterministic():
        benches: dict[str, tuple[ModuleNet, Visit]] = {}
        for objective, network in trained:
            if network is None:
                continue
            shape = repr(network) + repr({name: value.shape for name, value in network.state_dict().items()})
            if shape not in benches:  # most methods train the model as it is
                net = ModuleNet(network, torch.device("cuda:0"))
                benches[shape] = net, opened(net, model)
            _record_a_step(objective, *benches[shape], counted)
            recorded.add(type(objective).__name__)
    everywhere = {kind.Objective.__name__ for kind, _ in kinds() if not kind.halves} - {"Fusion"}
    assert recorded >= everywhere | ({"Fusion"} if model.startswith("fedfusion") else set())


@contextmanager
def deterministic() -> Iterator[None]:
    """Refuse what has no algorithm that repeats itself."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@cache
def kinds() -> list[tuple[Any, Settings]]:
    """Return every class of a method whose clients do something of their own, with its settings."""
    found: dict[Any, tuple[Any, Settings]] = {}
    for name in METHODS:
        values = group("method", name)
        kind = method_class(values.pop("module", name))
        settings = kind.Params(**{key: value for key, value in values.items() if key in kind.Params.model_fields})
        key = kind.Objective, repr(settings) if kind.Objective is not Objective else "", kind.halves
        found.setdefault(key, (kind, settings))
    return list(found.values())


def suited(kind: Any, settings: Settings, model: str, plain: nn.Module) -> nn.Module | None:
    """Return the network that a method trains, `plain` where it takes the model as it is; None if it refuses it."""
    changed = kind.build_model.__func__ is not Method.build_model.__func__
    try:
        network: nn.Module = kind.network(made(model) if changed else plain, settings, 1)
    except ConfigError as error:
        if not REFUSED.search(str(error)):
            raise
        return None
    if issubclass(kind, FedGen) and "classifier.weight" not in network.state_dict():
        return None  # FedGen.setup says so on the server
    return network


def opened(net: ModuleNet, model: str) -> Visit:
    """Return a visit with what any method sends."""
    embedding = getattr(net.module, "embedding", 1)
    means = np.random.default_rng(1).normal(size=(CLASSES, embedding)).astype(np.float32)
    inputs, y = examples(model, 2, net)
    extras = {
        "control": zeros(net),
        "known": {"labels": np.ones(CLASSES, np.uint8)},
        "prototypes": {"mean": means, "vectors": means, "present": np.ones(CLASSES, bool)},
    }
    return visits.visit(net, 0, 2, inputs=inputs, y=y, classes=CLASSES, exchange=1, config={MU: 0.1}, extras=extras)


def zeros(net: ModuleNet) -> dict[str, Any]:
    """Return arrays in the shapes of the parameters."""
    return {name: np.zeros(tuple(p.shape), np.float32) for name, p in net.params.items()}


def _record_a_step(objective: Objective, net: ModuleNet, opened: Visit, counted: Counted) -> None:
    noise, embedding = getattr(objective.params, "noise", 100), getattr(net.module, "embedding", 1)
    generator = as_arrays(create_generator(noise, CLASSES, 8, embedding, 1))
    state = zeros(net) if objective.keeps else {}
    one = replace(opened, state=state, extras={**opened.extras, "generator": generator})
    prepared = objective.prepare(one)
    momentum, total = torch.zeros_like(net.flat), net.flat.new_zeros(())
    settings = visits.settings(batch=2)
    stepper = trainer.Stepper(net, objective, prepared, settings, momentum, total, net.flat.new_zeros(()))
    rows, number = torch.arange(2).to(net.device), one.y.new_zeros(())
    before = len(counted.waits)
    counted.recorder.record(lambda: stepper.advance(Batch(one.inputs[rows], one.y, rows=rows, step=number)))
    assert counted.waits[before:] == []
    assert bool((momentum != 0).any())
