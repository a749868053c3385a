"""What a run prints, and how it goes on after Ctrl-C."""

import pytest

from fedcross.conf.compose import compose
from fedcross.core.errors import ConfigError
from fedcross.server.announce import describe, ending
from fedcross.server.commands.run import advice
from fedcross.server.launch import RunInterrupted, launch

SMALL = ["task=digits", "task.limit=120", "partition.clients=4", "clients_per_round=2", "rounds=1", "logger=none"]


def test_two_lines_say_what_runs():
    what, how = describe(compose([*SMALL, "method=fedavg", "partition=iid"])).splitlines()
    for word in ("fedavg on digits", "4 clients (iid)", "K=2", "1 round", "model mlp", "seed 1"):
        assert word in what
    assert how.startswith("engine local (")
    assert how.endswith("defence off, only 120 training examples")


def test_the_last_lines(tmp_path):
    found = {"rounds": 3, "final_accuracy": 0.5, "best_accuracy": 0.75}
    assert ending(found, tmp_path) == "Finished: 3 rounds, accuracy 50.00 % (best 75.00 %)"
    assert ending({"rounds": 1, "final_accuracy": None}, tmp_path) == "Finished: 1 round"
    assert "resume=" in ending(None, tmp_path, 0, 3)
    assert "Nothing was trained" in ending(None, tmp_path, 5, 3)


def test_advice_after_an_interrupt(tmp_path):
    assert "start again" in advice(RunInterrupted(tmp_path), [])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "round-000007.safetensors").touch()
    assert f"after round 7. Continue it with: fedcross resume={tmp_path}" in advice(RunInterrupted(tmp_path), [])


def test_clients_without_own_tests_cannot_score(tmp_path, capsys):
    with pytest.raises(ConfigError, match="evaluate_clients"):
        launch([*SMALL, "partition=dirichlet", "partition.min_size=1", "evaluate_clients=true"], tmp_path / "a")
    assert not (tmp_path / "a").exists()
