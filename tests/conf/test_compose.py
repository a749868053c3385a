import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.conf.compose import compose, join, split
from fedcross.core.errors import ConfigError


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


@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20)))
def test_overrides_survive_the_trip_through_one_string(overrides):
    assert split(join(overrides)) == overrides
