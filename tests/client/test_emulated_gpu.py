"""Whole rounds on an emulated GPU: every method and every model, on both trainers, equal to the CPU to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcross.client import trainer, workshop
from fedcross.client.app import app as client_app
from fedcross.client.app import together
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.compose import CONF, join
from fedcross.conf.schema import settings_class
from fedcross.core.settings import Settings
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.server.session import Session
from fedcross.strategies.parts.objective import Objective
from fedcross.tasks.models import create
from tests.support import visits
from tests.support.emulated_gpu import Counted, emulated_gpu
from tests.support.federation import Quiet, run, same, settle

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
TINY = ("rounds=1", "task.limit=72", "task.limit_test=24", "train.batch=8", "train.epochs=2", "partition.clients=6")


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Counted:
    """Run a federation on the CPU and on the emulated GPU; assert that the models are equal and nothing was dropped."""
    monkeypatch.delenv("FEDCROSS_DEVICE", raising=False)
    plain = run(folder / "cpu", *TINY, "device=cpu", *overrides).method.global_model()
    with emulated_gpu(monkeypatch) as counted:
        _no_waits_in_a_step(monkeypatch, counted)
        found = run(folder / "gpu", *TINY, "device=cuda", *overrides).method.global_model()
    lines = [json.loads(line) for line in (folder / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert [line["dropped"] for line in lines] == [0]
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
@pytest.mark.parametrize("method", ["fedavg", "fedgen", "scaffold"])
def test_a_whole_round_trains_together_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def finished(folder: str, device: str) -> Any:
        config, settled = settle(tmp_path / folder, *TINY, f"method={method}", f"device={device}")
        workshop._open.clear()
        grid = BatchedGrid(client_app, 6, {"overrides": join(settled)}, together, Params(cuda_graph=False))
        session = Session(config, grid, Quiet())
        session.execute()
        return session.method.global_model()

    monkeypatch.delenv("FEDCROSS_DEVICE", raising=False)
    plain = finished("cpu", "cpu")
    with emulated_gpu(monkeypatch):
        found = finished("gpu", "cuda")
    assert same(plain, found)


#: Model -> its settings, and the shape and kind of one example, as small as it takes.
MODELS: dict[str, tuple[int, ...]] = {
    "mlp": (1, 4, 4),
    "lenet5": (3, 32, 32),
    "cnn_w": (3, 32, 32),
    "cnn_femnist": (1, 28, 28),
    "resnet20": (3, 8, 8),
    "resnet20_lab": (3, 32, 32),
    "resnet18": (3, 8, 8),
    "lstm": (5,),
    "lstm_sent140": (5,),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_trains_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Two steps of the sequential trainer, the second a short batch, and an evaluation between two visits."""
    with workshop.one_thread(torch.device("cpu")):
        plain = _trained(model, torch.device("cpu"))
    with emulated_gpu(monkeypatch) as counted:
        found = _trained(model, torch.device("cuda:0"))
    assert counted.launches > 0
    assert {wait for wait in counted.waits if "to cuda" not in wait} <= {"_to_copy to cpu", "_local_scalar_dense"}
    for name, array in plain.items():  # an LSTM's fused kernel on the CPU sums in another order
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6 if "lstm" in model else 0, err_msg=name)


def _trained(model: str, device: torch.device) -> dict[str, Any]:
    shape = MODELS[model]
    text = len(shape) == 1
    task: Any = SimpleNamespace(name="made up", shape=shape, classes=4, vocabulary=7 if text else None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = ModuleNet(create(model, settings_class("model", model)(), task, 1), device)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(7, (5, *shape), generator=generator) if text else torch.randn(5, *shape, generator=generator)
    y = torch.randint(4, (5,), generator=generator)
    start = {name: array.copy() for name, array in net.read().items()}
    for _ in range(2):
        net.load(start)
        one = visits.visit(net, 0, 5, x=net.arrange(x.to(device)), y=y.to(device), classes=4)
        trainer.train(net, Objective(Settings()), one, {}, visits.settings(epochs=1, batch=3))
        net.logits(net.params, net.buffers, one.x, train=False)
    return {name: array.copy() for name, array in net.read().items()}
