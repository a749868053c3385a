"""What is checked before a run starts."""

import pytest

from fedcross.core.errors import ConfigError
from fedcross.server.launch import launch

SMALL = ["task=digits", "task.limit=120", "partition.clients=4", "clients_per_round=2", "rounds=1", "logger=none"]


def test_clients_without_own_tests_cannot_score(tmp_path, capsys):
    with pytest.raises(ConfigError, match="evaluate_clients"):
        launch([*SMALL, "partition=dirichlet", "partition.min_size=1", "evaluate_clients=true"], tmp_path / "a")
    assert not (tmp_path / "a").exists()
