"""The classic example runs as it is, and learns what the example on the Message API learns."""

import sys
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.supercore.run import Run

from fedcross.engines.grid import LocalGrid

APP = Path(__file__).resolve().parents[2] / "examples" / "classic_app"


@pytest.fixture
def apps(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from classic_app.client_app import app as client
    from classic_app.server_app import app as server

    yield server, client
    for name in [name for name in sys.modules if name.split(".")[0] == "classic_app"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_classic_app_learns_and_tells_the_accuracy_of_every_round(apps, capsys):
    server, client = apps
    grid = LocalGrid(client, 4, {})
    grid.set_run(Run.create_empty(1))
    config = {"rounds": 8, "clients-per-round": 3, "nodes": 4}
    server(grid, Context(1, 1, {}, RecordDict(), config))
    told = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line[1] for line in told] == [f"{number}:" for number in range(9)]
    assert float(told[-1][-1]) > 0.7


def test_a_list_of_arrays_is_the_model(apps):
    from classic_app.task import load, network, numbers

    model, other = network(), network()
    with torch.no_grad():
        model[0].weight += 1
    load(other, numbers(model))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
