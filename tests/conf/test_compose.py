"""Composition: what overrides mean, and errors that name the nearest valid setting."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedcross.conf import compose as composing
from fedcross.conf import schema
from fedcross.conf.compose import CONF, compose, join, split
from fedcross.conf.shorthand import SHORT, full_names, translated
from fedcross.core.errors import ConfigError
from fedcross.server.command_line import SUBCOMMANDS


def test_a_task_brings_its_model_and_the_command_line_wins():
    config = compose(())
    assert (config["method"]["name"], config["task"]["name"], config["model"]["name"]) == ("fedcross", "digits", "mlp")
    assert compose(("task=cifar10",))["model"]["name"] == "lenet5"
    assert compose(("task=cifar10", "model=resnet20"))["model"]["name"] == "resnet20"


def test_another_data_folder_counts_at_once(monkeypatch, tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setenv("FEDCROSS_DATA", str(folder))
        assert schema.load(["task=digits"]).data_root == str(folder)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("method=fedcros", "'fedcross'"),
        ("task=imagenet22k", "no such task"),
        ("round=3", "'rounds'"),
        ("train.momentun=0.1", "'train.momentum'"),
        ("rounds=[1,", "Quote the value"),
        ("output=läuf", "output='läuf'"),
        ("output=a=b", "output='a=b'"),
        ("rounds=1,2", "a sweep"),
        ("method.arguments={q: 0.2}", "no such setting"),
        ("model=a.b:C,a.b:D", "cannot sweep over import paths"),
    ],
)
def test_what_is_wrong_is_one_sentence(override, word):
    with pytest.raises(ConfigError) as caught:
        compose((override,))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_strategys_argument_without_its_plus_sign():
    with pytest.raises(ConfigError, match=r"\+method\.arguments\.NAME=VALUE"):
        compose(["method=flwr", "method.arguments.q=0.2"])


def test_what_is_returned_can_be_changed_without_harm():
    compose(())["seed"] = 99
    assert compose(())["seed"] == 1


def test_folders_are_set_after_composition(monkeypatch, tmp_path):
    plain = compose(["task=mnist"])
    placed = compose([f"output='{tmp_path}/it\\'s'", "task=mnist", f"data_root={tmp_path}", "hydra.run.dir=x"])
    assert (placed["output"], placed["task"]["root"]) == (f"{tmp_path}/it's", str(tmp_path))
    assert plain == compose(["task=mnist", "output=null"])
    monkeypatch.setenv("FEDCROSS_DATA", str(tmp_path))
    assert compose(["task=mnist"])["data_root"] == str(tmp_path)


def test_short_names_and_networks_by_path():
    assert full_names(["lr=0.1", "++alpha=1", "K=2", "seed=3", "clients"]) == [
        "train.lr=0.1", "++method.alpha=1", "clients_per_round=2", "seed=3", "clients",
    ]  # fmt: skip
    known = {name for name in composing._known_settings() if "." in name or name == "clients_per_round"}
    assert set(SHORT.values()) <= known
    assert translated(["model=a.b:C", "model.width=3"]) == ["model=own", "++model.path='a.b:C'", "++model.width=3"]
    assert schema.load(["lr=0.1", "K=3"]).train.lr == 0.1


@pytest.mark.slow
@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20)))
def test_overrides_survive_the_trip_through_one_string(overrides):
    assert split(join(overrides)) == overrides


def test_the_help_has_the_defaults_and_every_subcommand():
    text = yaml.safe_load((CONF / "config.yaml").read_text())["hydra"]["help"]["template"]
    found = 0
    for names, values in re.findall(r"^(\S.*?) \[(.+?)\] ", text, re.MULTILINE):
        first, *rest = names.split(", ")
        group = first.rpartition(".")[0]
        for name, value in zip([first, *(f"{group}{one}" for one in rest)], values.split(", "), strict=True):
            node = compose(("data_root=data",))
            for part in name.split("."):
                node = node[part]
            assert node == {"all": None, "outputs/...": None}.get(value, yaml.safe_load(value)), name
            found += 1
    assert found >= 20
    (line,) = re.findall(r"^fedcross SUBCOMMAND --help +(.+)$", text, re.MULTILINE)
    assert set(line.split(", ")) == set(SUBCOMMANDS)
