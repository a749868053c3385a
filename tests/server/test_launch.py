"""The start of a run: what it writes before its engine begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fedcross.conf.compose import compose
from fedcross.core.errors import ConfigError, StorageError
from fedcross.server.launch import launch, record
from fedcross.server.run_folder import saved_overrides
from tests.support.disk import largest_file

SETTINGS = ["method=fedavg", "task=digits", "partition.clients=4", "clients_per_round=2", "rounds=4", "train.epochs=1"]


def test_the_settings_of_a_run_are_written_for_its_user_alone(tmp_path: Path) -> None:
    record(tmp_path, SETTINGS)
    assert saved_overrides(tmp_path) == SETTINGS
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / ".hydra" / "config.yaml")) == compose(SETTINGS)
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / ".hydra").iterdir()}
    assert files == {"config.yaml": 0o600, "overrides.yaml": 0o600}


def test_a_full_disk_leaves_the_settings_of_the_run_that_goes_on(tmp_path: Path) -> None:
    """No file may grow beyond 64 bytes: neither of the two is cut, and the run goes on when there is room again."""
    record(tmp_path, SETTINGS)
    before = {path.name: path.read_bytes() for path in (tmp_path / ".hydra").glob("*.yaml")}
    with largest_file(64), pytest.raises(StorageError, match="cannot be written"):
        record(tmp_path, [*SETTINGS, "stop_at=null"])
    assert {path.name: path.read_bytes() for path in (tmp_path / ".hydra").glob("*.yaml")} == before
    record(tmp_path, [*SETTINGS, "stop_at=3"])
    assert saved_overrides(tmp_path)[-1] == "stop_at=3"


def test_a_model_that_privacy_cannot_protect_is_refused_before_the_run_has_a_folder(tmp_path: Path) -> None:
    private = ["model=resnet20", "privacy.enabled=true", "privacy.clip=1", "privacy.noise=1", "device=cpu"]
    with pytest.raises(ConfigError, match="resnet20 would send statistics of its data"):
        launch([*SETTINGS, *private], tmp_path / "run")
    assert not (tmp_path / "run").exists()
