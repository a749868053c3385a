"""One configuration, one model: the same bytes on this machine, over a SuperLink and on Ray."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedcross.server.launch import launch

#: Digits, a pool of five models, all clients a round, three rounds, seed 1.
SETTINGS = ["task=digits", "method.k=5", "rounds=3", "seed=1", "train.epochs=2", "logger=none"]
#: Two devices: a third one costs ten seconds of a core and shows nothing more.
CONFIGURATION = [*SETTINGS, "partition.clients=2", "clients_per_round=2"]


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, digits_cache: Path) -> str:
    folder = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_STATE", str(folder / "states"))
        patch.setenv("FEDCROSS_CACHE", str(digits_cache))
        return sha(launch(CONFIGURATION, folder / "run"))


@pytest.mark.slow
@pytest.mark.superlink
def test_authenticated_supernodes_give_the_local_model(tmp_path: Path, local: str) -> None:
    folder = launch([*CONFIGURATION, "engine=superlink"], tmp_path / "superlink")
    assert sha(folder) == local


@pytest.mark.slow
@pytest.mark.ray
def test_ray_gives_the_local_model(tmp_path: Path, local: str) -> None:
    folder = launch([*CONFIGURATION, "engine=ray"], tmp_path / "ray")
    assert sha(folder) == local
