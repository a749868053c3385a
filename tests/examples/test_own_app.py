"""The example app runs as it is: plain Flower replies, no fedcross client."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid

from fedcross.engines.grid import LocalGrid

APP = Path(__file__).resolve().parents[2] / "examples" / "own_app"


class Nameless(Grid):
    """A grid that, like Flower's own, does not know which node holds which partition."""

    def __init__(self, inner):
        self.inner = inner

    def __getattribute__(self, name):
        if name == "partitions":
            raise AttributeError(name)
        if name in {"inner", "__class__"}:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "inner"), name)

    set_run = run = create_message = get_node_ids = push_messages = pull_messages = send_and_receive = None


@pytest.fixture
def apps(monkeypatch, tmp_path):
    """The example's two apps, in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.chdir(tmp_path)
    from own_app.client_app import app as client
    from own_app.server_app import app as server

    yield server, client
    for name in [name for name in sys.modules if name.split(".")[0] == "own_app"]:
        del sys.modules[name]


def play(apps, grid, rounds=2, strategy="fedcross"):
    config = {"rounds": rounds, "clients-per-round": 3, "nodes": 4, "strategy": strategy}
    context = Context(1, 1, {}, RecordDict(), config)
    apps[0](grid, context)
    return torch.load("final_model.pt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedcross", "fedavg"])
def test_the_app_learns(apps, capsys, strategy):
    play(apps, LocalGrid(apps[1], 4, {}), rounds=8, strategy=strategy)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(told) == 9  # the initial model is round 0
    assert float(told[-1].split()[-1]) > 0.7


@pytest.mark.slow
def test_clients_without_a_query_handler_are_numbered_by_node(apps):
    known = play(apps, LocalGrid(apps[1], 4, {}))
    asked = play(apps, Nameless(LocalGrid(apps[1], 4, {})))
    assert all(torch.equal(known[name], asked[name]) for name in known)


def test_the_readme_shows_what_the_app_does():
    server = (APP / "own_app" / "server_app.py").read_text()
    readme = (APP / "README.md").read_text()
    shown = re.findall(r"`(from \w[^`]+|Fed\w+\([^`]+\))`", readme)
    assert len(shown) == 4
    server = server.replace("clients / nodes", "0.5").replace("=clients,", "=5,").replace("=nodes", "=10")
    for code in shown:
        assert code in server


@pytest.mark.parametrize("name", ["own_app", "classic_app"])
def test_flower_has_nothing_to_install_before_a_run(name):
    project = tomllib.loads((APP.parent / name / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []


def test_records_are_what_plain_flower_sends(apps):
    from own_app.task import network

    record = ArrayRecord(network().state_dict())
    assert list(record) == ["0.weight", "0.bias", "2.weight", "2.bias"]
