"""A process composes a configuration once and hands it on."""

import sys

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from fedcross.conf import compose as composing
from fedcross.conf import schema
from fedcross.core.errors import ConfigError
from fedcross.server.commands import run as command

SMALL = ["task.limit=200", "partition=iid", "partition.clients=2", "clients_per_round=2", "train.epochs=1", "rounds=1"]


@pytest.fixture
def compositions(monkeypatch):
    """What Hydra composes from here on, with nothing remembered from before."""
    seen = []
    real = ConfigLoaderImpl.load_configuration

    def counted(self, *arguments, **named):
        seen.append(list(named["overrides"]))
        return real(self, *arguments, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    monkeypatch.setattr(composing, "_composed", {})
    composing._plain.cache_clear()
    schema._load.cache_clear()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("place", ["output=here", "hydra.run.dir=here"])
def test_a_local_run_composes_once(monkeypatch, tmp_path, compositions, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedcross", *SMALL, "engine.workers=1", "logger=none", place])
    command.main(sys.argv[1:])
    assert (tmp_path / "here" / "result.json").exists()
    assert len(compositions) == 1, compositions
    recorded = [str(o) for o in OmegaConf.load(tmp_path / "here" / ".hydra" / "overrides.yaml")]
    assert recorded == [*SMALL, "engine.workers=1", "logger=none"]


def test_places_are_as_if_they_had_been_composed(compositions, tmp_path):
    here = str(tmp_path / "it's here")
    (tmp_path / "it's here").mkdir()
    quoted = here.replace("'", "\\'")
    plain = schema.load(["task=mnist"])
    placed = schema.load([f"output='{quoted}'", "task=mnist", f"data_root={tmp_path}", f"resume='{quoted}'"])
    assert (placed.output, placed.data_root, placed.resume) == (here, str(tmp_path), here)
    assert placed.task.root.is_relative_to(tmp_path)
    assert plain.output is None
    assert plain == schema.load(["task=mnist", "output=null"])
    assert len(compositions) == 1


def test_other_settings_or_another_environment_compose_anew(compositions, monkeypatch, tmp_path):
    first = schema.load(["rounds=3"])
    assert schema.load_text("rounds=3") is first
    assert schema.load(["rounds=4", "method=fedavg"]).rounds == 4
    monkeypatch.setenv("FEDCROSS_DATA", str(tmp_path))
    assert schema.load(["rounds=3"]).data_root == str(tmp_path)
    assert len(compositions) == 3


CHOICES = ["task=cifar10", "experiment=fedcross/table2_cnn"]
SETTINGS = [
    ["rounds=3", "train.lr=1e-3", "++method.alpha=0.5"],
    [
        "method.alpha={schedule: linear, start: 0.5, end: 0.9, rounds: 10}",
        "snapshots.rounds=[1,2]",
        "logger.name='a b'",
    ],
    ["clients_per_round=${rounds}", "partition.beta=null", "rounds=7", "rounds=8"],
    ["model.name=x", "++model.new.deep=1", "device='${oc.env:HOME}'"],
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_on_a_remembered_composition_are_as_if_they_had_been_composed(compositions, settings):
    """Configurations that choose the same files of the groups are composed once; Hydra's own result is the same."""
    plain = composing.compose(CHOICES)
    assert len(compositions) == 1
    quick = composing.compose([*settings[:1], *CHOICES, *settings[1:]])
    assert len(compositions) == 1
    assert composing.compose(CHOICES) == plain != quick
    full = composing.whole([*settings[:1], *CHOICES, *settings[1:]])
    assert len(compositions) == 2
    OmegaConf.set_struct(full, False)
    del full["hydra"]
    assert quick == OmegaConf.to_container(full, resolve=True)


@pytest.mark.parametrize("wrong", ["train.lrr=1", "rounds.deep=1", "+rounds=3", "~nothing", "rounds=1,2", "train=3"])
def test_what_is_wrong_is_told_as_by_a_whole_composition(compositions, wrong):
    composing.compose(())
    messages = []
    for function in (composing.compose, composing.whole):
        try:
            messages.append(dict(function([wrong]))["train"])
        except ConfigError as error:
            messages.append(error.faults)
    assert messages[0] == messages[1]
