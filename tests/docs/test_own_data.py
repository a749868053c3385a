"""The commands of docs/own-data.md run as they are printed, in their order, in a folder with the files they name."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.command import main
from tests.support.own_data import write_csv
from tests.test_documentation import FOUND

COMMANDS = [command for command in FOUND if command.page == "own-data.md"]
#: Added to a run, so that the test is short; what the page is about stays as it is.
SHORT = ["train.epochs=1", "logger=none", "engine.workers=1"]


def fill(folder: Path) -> None:
    """Write the files that the page names."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rng = np.random.default_rng(1)
    write_csv(folder / "fields.csv", 80)
    (folder / "reviews.txt").write_text("".join(f"{('good', 'bad')[i % 2]}\tword{i % 5} is it\n" for i in range(40)))
    for i in range(20):
        home = folder / "pictures" / ("cat", "dog")[i % 2]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (18, 20, 3), np.uint8)).save(home / f"{i}.png")
    np.savez(folder / "data.npz", x=rng.random((40, 5), np.float32), y=np.arange(40) % 3)
    columns = {"a": rng.random(40), "b": rng.random(40), "label": ["x", "y"] * 20}
    Dataset.from_dict(columns).save_to_disk(folder / "saved")


@pytest.mark.slow
def test_the_commands_run_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    assert len(COMMANDS) >= 9
    for command in COMMANDS:
        words = command.text.split()[1:]
        runs = "method=" in command.text
        more = SHORT if runs else []
        monkeypatch.setattr(sys, "argv", ["fedcross", *words, *more])
        assert main([*words, *more]) == 0, (command.text, capsys.readouterr().err)
    assert "kind" in (tmp_path / "fields.csv").read_text().splitlines()[0]
    assert "fedcross" in (tmp_path / "fields" / "report" / "report.md").read_text()
    assert {path.parent.name for path in tmp_path.glob("*/result.json")} == {
        "by-farm",
        "iid",
        "texts",
        "seen",
        "arrays",
        "saved-run",
    }
