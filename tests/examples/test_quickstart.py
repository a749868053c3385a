"""The notebook's cells run from top to bottom."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    from matplotlib import pyplot  # here: it takes seconds to import

    from fedcross import strategies

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUICKSTART_ROUNDS", "1")
    monkeypatch.setattr(strategies, "__path__", list(strategies.__path__))
    names = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert len(names["runs"]) == 4
    assert 0 < names["own"].metrics["test_accuracy"].max() <= 1
    assert pyplot.gca().get_legend() is not None
    pyplot.close("all")
