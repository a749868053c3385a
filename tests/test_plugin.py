"""A new method is three new files and no edit: here in a temporary folder, found through FEDCROSS_PATH."""

import json
import os
import sys

import pytest

from fedcross.conf.compose import compose
from fedcross.core.errors import ConfigError
from fedcross.core.paths import import_root, named_folders
from fedcross.server.commands.main import main
from fedcross.strategies.registry import method_class
from tests.support.federation import run

METHOD = '''
"""Toy method: keeps the upload of the client with the most examples."""

from dataclasses import dataclass

from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.method import Method, Task
from fedcross.strategies.objective import Objective
from fedcross.strategies.wire.records import Arrays


class ToyParams(Settings):
    scale: float = Field(1.0, gt=0)


class ToyObjective(Objective[ToyParams]):
    def loss(self, net, params, buffers, batch, prepared):
        return self.params.scale * super().loss(net, params, buffers, batch, prepared)


@dataclass
class ToyState:
    model: Arrays


class Toy(Method[ToyParams, ToyState]):
    Objective = ToyObjective

    def init(self, start):
        return ToyState(start.arrays)

    def dispatch(self, state, round):
        return [Task(client, slot, state.model) for slot, client in enumerate(round.clients)]

    def aggregate(self, state, round, uploads):
        if uploads:
            state.model = max(uploads, key=lambda upload: upload.num_examples).arrays
        return {"toy_uploads": float(len(uploads))}

    def global_model(self, state):
        return state.model
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    root = tmp_path / "mine"
    for name, text in {
        "strategies/toy.py": METHOD,
        "conf/method/toy.yaml": "# fedcross method=toy\nname: toy\nscale: 1.0\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("FEDCROSS_PATH", str(root))
    from fedcross import strategies

    before = list(strategies.__path__)
    yield root
    strategies.__path__[:] = before
    sys.modules.pop("strategies.toy", None)


def test_a_method_in_three_new_files_runs(plugin, tmp_path):
    run(tmp_path / "run", "method=toy", "method.scale=0.5", "rounds=2")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["toy_uploads"] == 3.0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["method"] == "toy"


@pytest.mark.parametrize("name", ["strategies/fedavg.py", "conf/method/fedavg.yaml", "tasks/models/mlp.py"])
def test_a_file_with_a_name_of_ours_is_refused_with_both_paths(plugin, name, capsys):
    (plugin / name).parent.mkdir(parents=True, exist_ok=True)
    (plugin / name).write_text("name: fedavg\n")
    assert main(["method=toy", "rounds=1"]) == 2
    told = capsys.readouterr().err
    assert str(plugin / name) in told
    assert str(import_root() / name) in told


def test_a_folder_named_twice_counts_once(plugin, monkeypatch):
    monkeypatch.setenv("FEDCROSS_PATH", os.pathsep.join([str(plugin), f"{plugin}/../{plugin.name}"]))
    assert named_folders() == [plugin]
    assert compose(["method=toy"])["method"]["name"] == "toy"


def test_an_unknown_method_lists_methods_only():
    with pytest.raises(ConfigError) as caught:
        method_class("qqqqq")
    assert "fedcross" in str(caught.value)
    assert not {"guard", "wire", "round", "parts", "classic"} & set(str(caught.value).replace(",", " ").split())
