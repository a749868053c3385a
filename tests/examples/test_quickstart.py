"""The notebook runs from top to bottom."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbformat  # here: these two take seconds to import
    from nbclient import NotebookClient

    monkeypatch.setenv("QUICKSTART_ROUNDS", "2")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert 0 < float(last.outputs[-1]["data"]["text/plain"].removeprefix("np.float64(").rstrip(")")) <= 1
