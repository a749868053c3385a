"""A run folder that version 0.1 wrote (`run-0.1`, three rounds on digits) is continued, reported and opened."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedcross
from tests.support.command import subcommand

OLD = Path(__file__).parent / "run-0.1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run"))


@pytest.mark.slow
def test_it_is_continued(old):
    before = (old / "metrics.jsonl").read_text()
    run = fedcross.run(f"resume={old}", "rounds=4", "engine.workers=1")
    assert (old / "metrics.jsonl").read_text().startswith(before)
    assert run.metrics["round"].tolist() == [1, 2, 3, 4]
    assert run.metrics["test_accuracy"][3] > 0.6  # 25, 46, 66 % before


def test_its_model_is_opened_and_exported(old, tmp_path):
    state = fedcross.load(old).model.state_dict()
    final = load_file(old / "model.safetensors")
    assert {name: tensor.shape for name, tensor in state.items()} == {name: a.shape for name, a in final.items()}
    assert all(np.array_equal(state[name].numpy(), array) for name, array in final.items())
    assert subcommand("export")([str(old), "--out", str(tmp_path / "m.safetensors")]) == 0
    again = load_file(tmp_path / "m.safetensors")
    assert all(np.array_equal(again[name], array) for name, array in final.items())


def test_a_report_reads_it(old, tmp_path):
    assert subcommand("report")([str(old), "--out", str(tmp_path / "report"), "--no-html"]) == 0
    assert "fedcross" in (tmp_path / "report" / "report.md").read_text()
