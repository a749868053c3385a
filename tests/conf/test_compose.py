import copy

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fedcross.conf.compose import _composition, compose, join, split
from fedcross.core.errors import ConfigError
from tests.support import config_files


def fault(*overrides):
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def test_the_default_is_fedcross_on_digits():
    config = compose(())
    assert (config["method"]["name"], config["task"]["name"], config["model"]["name"]) == ("fedcross", "digits", "mlp")


def test_a_task_brings_its_model_and_the_command_line_wins():
    assert compose(("task=cifar10",))["model"]["name"] == "lenet5"
    assert compose(("task=cifar10", "model=resnet20"))["model"]["name"] == "resnet20"


def test_unknown_group_choices_name_the_nearest():
    assert "Did you mean 'fedcross'?" in fault("method=fedcros")
    assert "there is no such task" in fault("task=imagenet22k")


def test_a_typo_in_a_setting_names_the_nearest():
    assert "Did you mean 'rounds'?" in fault("round=3")
    assert "Did you mean 'train.momentum'?" in fault("train.momentun=0.1")
    assert "Did you mean 'method'?" in fault("metod=fedavg")


def test_nonsense_is_one_readable_sentence():
    message = fault("rounds=[1,")
    assert "\n" not in message
    assert "Traceback" not in message


def test_what_is_returned_can_be_changed_without_harm():
    compose(())["seed"] = 99
    assert compose(())["seed"] == 1


@pytest.mark.slow
@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20)))
def test_overrides_survive_the_trip_through_one_string(overrides):
    assert split(join(overrides)) == overrides


@pytest.mark.parametrize(
    "overrides",
    [("method=fedct", "seed=3"), ("task=sent140", "hydra.run.dir=there"), ("experiment=demo", "devices=uniform")],
    ids=" ".join,
)
def test_a_composition_that_begins_with_what_was_merged_before_is_hydras_own(monkeypatch, overrides):
    """tests.support.config_files: the tests compose from files that are merged once; a user's command does not."""
    found = _composition(overrides)
    for name, function in config_files.HYDRAS.items():
        monkeypatch.setattr(ConfigLoaderImpl, name, function)
    copied = copy.deepcopy(found)
    for kind, function in config_files.COPIES.items():
        monkeypatch.setattr(kind, "__deepcopy__", function)
    assert nodes(copied) == nodes(copy.deepcopy(found)) == nodes(found)
    assert OmegaConf.to_yaml(copied) == OmegaConf.to_yaml(found)
    expected = _composition(overrides)
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    assert nodes(found) == nodes(expected)


def nodes(node):
    """Return type, flags and parent of `node` and of each node below it."""
    kind = type(node), OmegaConf.get_type(node), node._metadata.ref_type, node._metadata.flags, node._metadata.key
    inner = node._content if OmegaConf.is_config(node) else None
    below = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else []
    assert all(one._get_parent() is node for one in below)
    return [kind, *(nodes(one) for one in below)]


@pytest.mark.parametrize("given", ["method.arguments={q: 0.2}", "method.arguments.q=0.2", "method.options.q=0.2"])
def test_a_strategys_argument_without_its_plus_sign(given):
    with pytest.raises(ConfigError, match=r"one by one, each with a plus sign: \+method\.arguments\.NAME=VALUE"):
        compose(["method=flwr", given])
    with pytest.raises(ConfigError, match="no such setting"):
        compose([given])
