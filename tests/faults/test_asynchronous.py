"""An asynchronous run over a real network, and its record repeated on this machine: the same model, to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedcross.server.launch import launch

CONFIGURATION = [
    *("method=fedcross_async", "task=digits", "partition.clients=3", "clients_per_round=2", "rounds=3", "seed=1"),
    *("train.epochs=2", "logger=none"),
]
pytestmark = [pytest.mark.superlink, pytest.mark.slow]


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_visits_as_they_arrived_can_be_repeated_here(
    tmp_path: Path, digits_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCROSS_STATE", str(tmp_path / "states"))
    monkeypatch.setenv("FEDCROSS_CACHE", str(digits_cache))
    real = launch([*CONFIGURATION, "clock=real", "engine=superlink"], tmp_path / "real")
    replay = [*CONFIGURATION, "clock=replay", f"clock.events={real / 'visits.jsonl'}"]
    for workers in (1, 2):
        assert sha(launch([*replay, f"engine.workers={workers}"], tmp_path / f"replay-{workers}")) == sha(real)


def test_the_virtual_clock_gives_one_model_on_a_network_and_here(
    tmp_path: Path, digits_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCROSS_STATE", str(tmp_path / "states"))
    monkeypatch.setenv("FEDCROSS_CACHE", str(digits_cache))
    over = launch([*CONFIGURATION, "engine=superlink"], tmp_path / "superlink")
    assert sha(launch(CONFIGURATION, tmp_path / "local")) == sha(over)
