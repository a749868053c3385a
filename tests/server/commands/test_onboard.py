"""fedcross onboard, end to end on a tiny run, and its measures by hand."""

import json
from pathlib import Path

import pytest

from fedcross.server.commands.onboard import Newcomer, onboard
from fedcross.server.launch import record
from tests.support.command import subcommand
from tests.support.federation import SMALL, run

main = subcommand("onboard")

PERMUTED = ("partition=permuted", "partition.clients=3", "rounds=2", "train.lr=0.05", "task.limit=90")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = []
    for name in ("fedavg", "fedfusion_multi"):
        overrides = [*PERMUTED, f"method={name}", "model=fedfusion_mnist", "seed=2"]
        folder = tmp_path / name
        run(folder, *overrides)
        record(folder, [*SMALL, *overrides])
        folders.append(folder)
    return folders


def test_measures_by_hand():
    newcomer = Newcomer("run", "fedavg", 1, 3, 10, [0.1, 0.5, 0.8, 0.79, 0.81])
    assert newcomer.converged(0.011) == 2  # 0.80 is within 0.011 of 0.81
    assert newcomer.converged(0.0) == 4
    assert newcomer.reached(0.5) == 1
    assert newcomer.reached(0.9) is None


@pytest.mark.slow
def test_command_measures_every_run(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    line = [*map(str, runs), "--epochs", "3", "--out", str(out), "--target", "0.01", "0.9999", "--set", "train.lr=0.03"]
    assert main(line) == 0
    told = json.loads((out / "onboard.json").read_text())
    assert [n["label"] for n in told["newcomers"]] == ["fedavg", "fedfusion_multi"]
    for newcomer in told["newcomers"]:
        # 90 examples over four clients: the newcomer, client 3, has 22; three epochs after the start.
        assert (newcomer["client"], newcomer["examples"], len(newcomer["accuracy"])) == (3, 22, 4)
        assert newcomer["reached"]["0.01"] is not None
    printed = capsys.readouterr().out
    assert "| fedfusion_multi | 1 |" in printed
    assert printed.strip() == (out / "onboard.md").read_text().strip()
    assert (out / "onboard.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_newcomer_learns_and_is_reproducible(runs: list[Path]):
    first = onboard(runs[1], 8, ["train.lr=0.05", "train.momentum=0.9"])
    assert first.accuracy == onboard(runs[1], 8, ["train.lr=0.05", "train.momentum=0.9"]).accuracy
    assert first.accuracy[-1] > first.accuracy[0] + 0.1


@pytest.mark.slow
def test_wrong_use_is_told(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main([str(runs[0]), "--epochs", "0"]) == 2
    assert "at least 1 epoch" in capsys.readouterr().err
    (runs[0] / "model.safetensors").unlink()
    assert main([str(runs[0])]) == 2
    assert "not the final model" in capsys.readouterr().err
    kept = [o for o in SMALL if not o.startswith(("partition", "clients_per_round"))]
    record(runs[1], [*kept, "partition=classes", "clients_per_round=2"])
    assert main([str(runs[1])]) == 2
    assert "--client" in capsys.readouterr().err
