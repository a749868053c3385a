"""Whole rounds on an emulated GPU: every kind of client, on both trainers, equal to the CPU to the bit."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcross.client import trainer, workshop
from fedcross.client.app import app as client_app
from fedcross.client.app import together
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.compose import join
from fedcross.core.settings import Settings
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.server.session import Session
from fedcross.strategies.parts.loss_random import categorical
from fedcross.strategies.parts.objective import Objective
from fedcross.tasks.inputs import Inputs
from tests.support import visits
from tests.support.emulated_gpu import Counted, emulated_gpu
from tests.support.federation import Quiet, run, same, settle
from tests.support.methods import CLIENTS

NORMED = ("model=own", "model.path=tests.support.slices:Normed")
#: Methods whose steps differ most from each other; on 2026-11-22 all methods trained so.
TOGETHER = ("fedavg", "fedgen", "scaffold", "fedsam", "fedasam", "moon", "feddecorr", "fedntd", "fedct_moon")
TINY = ("rounds=2", "task.limit=72", "task.limit_test=24", "train.batch=8", "train.epochs=2", "partition.clients=6")


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Counted:
    """Run a federation on the CPU and on the emulated GPU; assert that the models are equal and nothing was dropped.

    On the GPU the clients' pictures lie as bytes, and what is kept for later visits is counted so.
    """
    plain = on(monkeypatch, "cpu", folder / "cpu", *overrides)
    with emulated_gpu(monkeypatch) as counted:
        _no_waits_in_a_step(monkeypatch, counted)
        found = on(monkeypatch, "cuda", folder / "gpu", *overrides)
        (shop,) = workshop._open.values()
        assert {inputs.held.dtype for inputs, _ in shop.prepared.values()} <= {torch.uint8}
    lines = [json.loads(line) for line in (folder / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert [line["dropped"] for line in lines] == [0, 0]
    assert counted.recorder.replays > counted.recorder.recordings > 0
    assert same(plain, found)
    return counted


def on(monkeypatch: pytest.MonkeyPatch, device: str, folder: Path, *overrides: str) -> Any:
    """Run a federation on this site's `device` and return its model; the configuration is composed once for both."""
    monkeypatch.setenv("FEDCROSS_DEVICE", device)
    return run(folder, *TINY, *overrides).method.global_model()


def _no_waits_in_a_step(monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    """Assert that the host never waits for the GPU in a step, called or recorded; the recorder refuses the latter."""
    real = trainer.Stepper.advance

    def watched(*arguments: Any) -> None:
        before = len(counted.waits)
        real(*arguments)
        assert counted.waits[before:] == []

    monkeypatch.setattr(trainer.Stepper, "advance", watched)


@pytest.mark.slow
@pytest.mark.parametrize("method", CLIENTS)
def test_every_method_trains_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    own = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
    own += ["method.generator_steps=3"] if method.startswith("fedgen") else []  # on the server, and long
    both(tmp_path, monkeypatch, f"method={method}", "evaluate_local=true", *own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("train.examples=9", "compression.up=int8", "compression.down=int8", "train.clip=1"),
        ("train.only=[classifier.*]",),
        ("+task.augment={flip: true, crop: 1}",),
        ("partition=dirichlet", "partition.beta=0.1", "task.limit=200"),
        ("method=fedct", "+method.host_epochs=3"),
        ("method=fedfan_three_sizes", *NORMED),
    ],
    ids=[
        "part of the examples",
        "part of the model",
        "augmentation",
        "unequal clients",
        "other epochs at a host",
        "nested corners",
    ],
)
def test_other_settings_train_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    both(tmp_path, monkeypatch, *settings)


@pytest.mark.slow
def test_steps_that_differ_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("method=fedfan_three_sizes", "method.nested_steps=in_turn", *NORMED)
    plain = on(monkeypatch, "cpu", tmp_path / "cpu", *own)
    with emulated_gpu(monkeypatch) as counted:
        found = on(monkeypatch, "cuda", tmp_path / "gpu", *own)
    assert counted.recorder.recordings == 0
    assert same(plain, found)


@pytest.mark.slow
def test_a_site_without_recorded_steps_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCROSS_GRAPHS", "off")
    plain = on(monkeypatch, "cpu", tmp_path / "cpu")
    with emulated_gpu(monkeypatch) as counted:
        found = on(monkeypatch, "cuda", tmp_path / "gpu")
    assert counted.recorder.recordings == 0
    assert same(plain, found)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*TOGETHER, "fedfan_three_sizes"])
def test_a_whole_round_trains_together_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Without recorded steps equal to the CPU to the bit; recorded ones pad all batches, so sums differ in rounding."""

    def finished(folder: str, device: str, *, graph: bool = False) -> Any:
        own = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
        own += ["method.generator_steps=3"] if method.startswith("fedgen") else []
        own += NORMED if method == "fedfan_three_sizes" else []  # padding in the corners' batch normalisation too
        monkeypatch.setenv("FEDCROSS_DEVICE", device)
        config, settled = settle(tmp_path / folder, *TINY, f"method={method}", *own)
        workshop._open.clear()
        grid = BatchedGrid(client_app, 6, {"overrides": join(settled)}, together, Params(cuda_graph=graph))
        session = Session(config, grid, Quiet())
        session.execute()
        return session.method.global_model()

    plain = finished("cpu", "cpu")
    with emulated_gpu(monkeypatch) as counted:
        called = finished("gpu", "cuda")
        assert counted.recorder.recordings == 0
        recorded = finished("graph", "cuda", graph=True)
        assert counted.recorder.replays > counted.recorder.recordings > 0
    assert same(plain, called)
    # FedDecorr divides by the deviation of each dimension, which is tiny where a unit is hardly ever active.
    apart = 1e-4 if method == "feddecorr" else 1e-5
    for name, array in plain.items():
        np.testing.assert_allclose(recorded[name], array, rtol=0, atol=apart, err_msg=name)


class Peaks(torch.nn.Module):
    """A network of a user with a layer that torch has no deterministic algorithm for."""

    def __init__(self) -> None:
        super().__init__()
        parts = torch.nn.Conv2d(1, 2, 3), torch.nn.AdaptiveMaxPool2d(2), torch.nn.Flatten()
        self.features, self.classifier = torch.nn.Sequential(*parts), torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(x))
        return scores


@pytest.mark.slow
def test_a_layer_that_does_not_repeat_itself_is_named_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDCROSS_DEVICE", "cuda")
    with emulated_gpu(monkeypatch) as counted:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            own = f"model={__name__}:Peaks"
            finished = run(tmp_path / "gpu", *TINY, "method=fedavg", "train.deterministic=true", own)
        finally:
            torch.use_deterministic_algorithms(False)
    assert counted.unrepeatable
    assert finished.method.global_model()
    said = [record.message for record in caplog.records if "no deterministic algorithm" in record.message]
    assert len(said) == 1
    assert "adaptive_max_pool2d_backward" in said[0]


@pytest.mark.slow
def test_another_run_gets_the_memory_of_recorded_steps_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCROSS_DEVICE", "cuda")
    emptied: list[bool] = []
    with emulated_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        run(tmp_path / "one", *TINY, "method=fedavg")
        ((_, shop),) = workshop._open.items()
        (recorder,) = shop.recorders
        (stage,) = recorder._recordings._stages.values()
        place, emptied[:] = weakref.ref(stage._orders), []
        replays = recorder.replays
        del stage
        gc.disable()
        try:
            workshop._close()
            assert place() is None
        finally:
            gc.enable()
        assert emptied == [True]
        assert recorder.replays == replays > 0
        assert workshop._open == {}


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


def test_the_plain_loop_takes_the_learning_rate_as_a_recorded_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may round a step with a number otherwise than one with a tensor; models of both meet in one round."""
    seen, step = [], trainer.step

    def watched(flat: Any, gradient: Any, momentum: Any, lr: Any, *rest: Any) -> None:
        seen.append(lr.device.type if isinstance(lr, torch.Tensor) else "number")
        step(flat, gradient, momentum, lr, *rest)

    monkeypatch.setattr(trainer, "step", watched)
    plain = visits.small_net(dtype=torch.float32)
    start = {name: array.copy() for name, array in plain.read().items()}
    objective, settings = Objective(Settings()), visits.settings()
    with workshop.one_thread(torch.device("cpu")):
        expected = trainer.train(plain, objective, visits.visit(plain, 0, 9), {}, settings).flat.clone()
    assert set(seen) == {"number"}
    seen.clear()
    with emulated_gpu(monkeypatch):
        net = ModuleNet(plain.module, torch.device("cuda:0"))
        net.load(start)
        one = visits.visit(plain, 0, 9)
        one = replace(one, inputs=Inputs(one.inputs.held.to("cuda:0")), y=one.y.to("cuda:0"))
        found = trainer.train(net, objective, one, {}, settings).flat.detach().cpu().clone()
    assert set(seen) == {"cuda"}
    assert torch.equal(expected, found)


def test_a_label_of_weight_0_is_not_drawn_on_a_gpu_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``cumsum`` adds pieces in parallel, so the sum of a label without weight may be above the one before."""
    key, weights, cumsum = torch.tensor(1), torch.tensor([1.0, 0.0, 3.0]), torch.cumsum
    expected = categorical(key, 0, 0, 200, weights)
    monkeypatch.setattr(torch, "cumsum", lambda x, dim: cumsum(x, dim) + torch.tensor([0.0, 0.5, 0.0]).to(x.device))
    with emulated_gpu(monkeypatch):
        found = categorical(key.to("cuda:0"), 0, 0, 200, weights.to("cuda:0")).cpu().clone()
    assert 1 not in found.tolist()
    assert torch.equal(found, expected)
