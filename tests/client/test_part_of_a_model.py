"""Runs in which clients train a part of the model: what travels, what is stored, and that the engines agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.common.serde import message_to_proto
from safetensors.numpy import load_file

from fedcross.client import cache
from fedcross.client.app import app
from fedcross.client.together import together
from fedcross.conf.compose import join
from fedcross.core.errors import ConfigError, FederationError
from fedcross.engines.batched import BatchedGrid
from fedcross.engines.batched import Params as BatchedParams
from fedcross.engines.grid import LocalGrid
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.observers import Observer
from fedcross.server.session import Session
from fedcross.tasks.models.part import base_tensors
from tests.support.federation import run, same, session, settle

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, classes, hidden=512):
        super().__init__()
        self.features = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.classifier(self.features(x))
"""
#: A big frozen base with adapters and a classifier that are trained.
LORA = (
    "model=partnets.net:Net",
    "model.lora={r: 32, target_modules: ['1', '4']}",
    "train.only=['*lora_*','classifier.*']",
)
#: The same base, of which the classifier is trained.
HEAD = (LORA[0], "train.only=['classifier.*']")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reader's own package: one folder for all tests here, since compositions are remembered by it."""
    root = tmp_path_factory.mktemp("user")
    (root / "partnets").mkdir()
    return root


@pytest.fixture(autouse=True)
def _nets(folder, monkeypatch):
    (folder / "partnets" / "net.py").write_text(NET)  # a test changes it
    monkeypatch.setenv("FEDCROSS_PATH", str(folder))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "partnets"]:
        del sys.modules[name]


class Counting(LocalGrid):
    """Counts the bytes of the training messages as they would be sent."""

    down: list[int]
    up: list[int]

    def push_messages(self, messages):
        listed = list(messages)
        self.down = [*getattr(self, "down", []), *(message_to_proto(m).ByteSize() for m in listed if m.has_content())]
        return super().push_messages(listed)

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        self.up = [*getattr(self, "up", []), *(message_to_proto(m).ByteSize() for m in replies if m.has_content())]
        return replies


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedcross method.k=4"])
def test_a_round_sends_the_adapters_and_hardly_more(tmp_path: Path, method: str) -> None:
    config, settled = settle(tmp_path, *LORA, *f"method={method}".split(), "rounds=1")
    cache._open.clear()
    grid = Counting(app, 6, {"overrides": join(settled)})
    ready = Session(config, grid, Observer())
    ready.execute()
    adapters = sum(a.nbytes for a in ready.driver.global_model().values())
    base = sum(t.nbytes for t in base_tensors(ready.evaluator.network()))
    assert base > 4 * adapters
    sent = [size for size in grid.down if size > 1000]  # the others ask who is there
    got = [size for size in grid.up if size > 1000]
    assert len(sent) == len(got) == 3
    assert max(sent + got) <= 1.05 * adapters
    assert min(sent + got) > adapters
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["bytes_down"] == line["bytes_up"] == 3 * adapters


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcross method.k=4", "scaffold", "moon", "fedcross compression.up=int8"])
def test_everything_stored_is_the_part_and_resume_continues_it(tmp_path: Path, method: str) -> None:
    settings = [*LORA, *f"method={method}".split()]
    whole = run(tmp_path / "whole", *settings, "rounds=2", "defence.enabled=true")
    run(tmp_path / "cut", *settings, "rounds=1", "defence.enabled=true")
    resumed = run(tmp_path / "cut", *settings, "rounds=2", "defence.enabled=true", f"resume={tmp_path / 'cut'}")
    assert same(resumed.driver.global_model(), whole.driver.global_model())
    names = set(load_file(tmp_path / "whole" / "model.safetensors"))
    assert names == set(whole.driver.start.spec)
    assert all("lora_" in name or "classifier" in name or "head" in name for name in names)
    _, state, identity = Checkpoints(tmp_path / "whole").latest()
    assert identity["data"]["base"] == whole.base
    if "pool.rows" in state.arrays:
        assert state.arrays["pool.rows"].shape[1] == sum(np.prod(s) for s, _ in whole.driver.start.spec.values())


@pytest.mark.slow
def test_the_batched_engine_agrees(tmp_path: Path) -> None:
    settings = [*LORA, "method=fedcross", "method.k=4", "rounds=2"]
    alone = run(tmp_path / "local", *settings)
    config, settled = settle(tmp_path / "batched", *settings)
    cache._open.clear()
    many = Session(config, BatchedGrid(app, 6, {"overrides": join(settled)}, together, BatchedParams()), Observer())
    many.execute()
    found, expected = many.driver.global_model(), alone.driver.global_model()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_all_of_a_model_is_what_no_pattern_gives(tmp_path: Path) -> None:
    plain = run(tmp_path / "a", "method=fedcross", "method.k=4", "rounds=1")
    whole = run(tmp_path / "b", "method=fedcross", "method.k=4", "rounds=1", "train.only='*'")
    assert same(plain.driver.global_model(), whole.driver.global_model())
    assert plain.base == whole.base == ""


@pytest.mark.slow
def test_statistics_travel_where_they_match(tmp_path: Path) -> None:
    ready = run(tmp_path, LORA[0], "train.only=['features.2.*','classifier.*']", "method=fedavg", "rounds=1")
    assert "features.2.running_mean" in ready.driver.start.spec
    assert (ready.driver.global_model()["features.2.running_mean"] != 0).any()


def test_another_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("fedcross.engines.grid.log", lambda level, text, *values: told.append(text % values))
    ready = session(tmp_path, *HEAD, "method=fedavg")
    ready.driver.ledger.base = "0" * 64
    with pytest.raises(FederationError, match="All 3 clients of round 1 failed alike: ProtocolError: The base"):
        ready.driver.run_round(1, ready.grid)
    assert f"SHA-256 is {ready.base[:16]}... here and {'0' * 16}... at the server" in told[0]


def test_a_changed_base_cannot_be_resumed(tmp_path: Path) -> None:
    run(tmp_path, *HEAD, "method=fedavg", "rounds=1")
    net = Path(sys.modules["partnets.net"].__file__ or "")
    net.write_text(NET.replace("self.classifier = nn", "nn.init.ones_(self.features[1].weight); self.classifier = nn"))
    for name in ("partnets.net", "partnets"):
        del sys.modules[name]
    with pytest.raises(ConfigError, match=r"SHA-256"):
        session(tmp_path, *HEAD, "method=fedavg", "rounds=2", f"resume={tmp_path}")


def test_a_file_of_the_base_needs_a_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without train\.only there is no base"):
        session(tmp_path, "method=fedavg", "train.base=base.safetensors")
