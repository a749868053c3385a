"""One configuration, one model: the engines agree bit for bit with the one inside this process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engines

ROOT = Path(engines.__path__[0]).parent
SETTINGS = [
    "task=digits",
    "method=fedcross",
    "partition.clients=3",
    "clients_per_round=3",
    "rounds=2",
    "train.epochs=1",
    "seed=1",
]


def model(engine: str, folder: Path) -> str:
    """Run the configuration on `engine` and return the SHA-256 of the global model."""
    result = subprocess.run(
        [sys.executable, "-m", "server.run", f"engine={engine}", f"output={folder}", *SETTINGS],
        check=False,
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model("local", tmp_path_factory.mktemp("local") / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [pytest.param("ray", marks=pytest.mark.ray), pytest.param("superlink", marks=pytest.mark.superlink)]
)
def test_same_configuration_same_model(engine: str, expected: str, tmp_path: Path) -> None:
    assert model(engine, tmp_path / "run") == expected
