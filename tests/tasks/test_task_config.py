"""The YAML of tasks and partitions: each is accepted by its module, and a task brings its default model."""

import pytest

from fedcross.conf.compose import CONF
from fedcross.core.settings import find, parse
from tests.support.config_files import read_choice

MODELS = {
    "arrays": "mlp",
    "cifar10": "lenet5",
    "digits": "mlp",
    "femnist": "cnn_femnist",
    "folder": "lenet5",
    "mnist": "lenet5",
    "sent140": "lstm_sent140",
    "shakespeare": "lstm",
    "table": "mlp",
    "text": "lstm_sent140",
    "tinyimagenet": "resnet18",
}


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, path.stem) for group in ("task", "partition") for path in sorted((CONF / group).glob("*.yaml"))],
)
def test_every_setting_is_in_the_file_and_accepted_by_the_module(group, option):
    values = read_choice(group, option) | ({"file": "a.json"} if option == "indices" else {})
    model = values.pop("default_model", None)
    assert model == MODELS.get(option, model)
    name = values.pop("name")
    module = find(
        "fedcross.tasks" if group == "task" else "fedcross.tasks.partition", values.pop("module", name), group
    )
    faults: list[str] = []
    assert parse(module.Params, values, group, faults) is not None, faults
    assert callable(module.load if group == "task" else module.split)
    assert set(values) == set(module.Params.model_fields)
