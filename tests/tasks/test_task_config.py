"""The YAML of tasks and partitions: each is accepted by its module, and a task brings its default model."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fedcross.core.settings import find, parse

CONF = Path(__file__).parents[2] / "conf"
TASKS = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
PARTITIONS = sorted(path.stem for path in (CONF / "partition").glob("*.yaml"))
MODELS = {
    "arrays": "mlp",
    "cifar10": "lenet5",
    "cifar100": "lenet5",
    "cifar10_fedct": "lenet5",
    "cifar100_coarse": "lenet5",
    "cifar100_fedct": "lenet5",
    "digits": "mlp",
    "femnist": "cnn_femnist",
    "femnist_300": "cnn_femnist",
    "folder": "lenet5",
    "mnist": "lenet5",
    "sent140": "lstm_sent140",
    "shakespeare": "lstm",
    "dataset": "mlp",
    "table": "mlp",
    "text": "lstm_sent140",
    "tinyimagenet": "resnet18",
    "vireofood172": "resnet18",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A configuration folder with the real tasks and partitions and a stand-in per model, so that only these count."""
    folder = tmp_path_factory.mktemp("conf")
    for group in ("task", "partition"):
        (folder / group).symlink_to(CONF / group)
    (folder / "model").mkdir()
    for name in {*MODELS.values(), "other"}:
        (folder / "model" / f"{name}.yaml").write_text(f"name: {name}\n")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /task: mnist\n  - override /model: other\n"
    )
    defaults = ["_self_", {"model": "mlp"}, {"partition": "iid"}, {"task": "digits"}, {"experiment": None}]
    (folder / "config.yaml").write_text(yaml.safe_dump({"defaults": defaults, "seed": 1, "data_root": "data"}))
    return folder


def composed(root: Path, *overrides: str):
    with initialize_config_dir(str(root), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return config


def settings_of(config: dict, package: str, group: str):
    values = dict(config[group])
    name = values.pop("name")
    module = find(package, values.pop("module", name), group)
    faults: list[str] = []
    params = parse(module.Params, values, group, faults)
    assert faults == []
    return module, params


def test_every_task_has_a_default_model():
    assert set(MODELS) == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_task_is_accepted_and_brings_its_model(root, task):
    config = composed(root, f"task={task}")
    assert config["model"]["name"] == MODELS[task]
    module, params = settings_of(config, "fedcross.tasks", "task")
    assert callable(module.load)
    missing = set(type(params).model_fields) - set(config["task"])
    assert missing == set(), "every setting is visible in the YAML file"


@pytest.mark.parametrize("partition", PARTITIONS)
def test_partition_is_accepted(root, partition):
    config = composed(root, f"partition={partition}", *(["partition.file=a.json"] if partition == "indices" else []))
    module, params = settings_of(config, "fedcross.tasks.partition", "partition")
    assert callable(module.split)
    assert set(type(params).model_fields) == set(config["partition"]) - {"name"}


def test_model_on_the_command_line_wins(root):
    assert composed(root, "task=cifar10", "model=other")["model"]["name"] == "other"
    assert composed(root, "model=other", "task=cifar10")["model"]["name"] == "other"


def test_experiment_may_choose_both(root):
    config = composed(root, "experiment=mine")
    assert (config["task"]["name"], config["model"]["name"]) == ("mnist", "other")


def test_sweep_composes_each_point_with_its_own_model(root):
    points = [composed(root, f"task={task}") for task in ("digits", "cifar10", "digits")]
    assert [point["model"]["name"] for point in points] == ["mlp", "lenet5", "mlp"]


@pytest.mark.parametrize("path", sorted((CONF / "task").glob("*.yaml")) + sorted((CONF / "partition").glob("*.yaml")))
def test_file_opens_with_its_command(path):
    head = path.read_text().splitlines()[0]
    assert head.startswith("# fedcross ")
    assert f"{path.parent.name}={path.stem}" in head


@pytest.mark.parametrize("task", ["digits", "digits task.limit=1000"])
def test_the_bundled_task_divides_for_every_seed_as_it_comes(root, task):
    config = composed(root, *f"task={task}".split())
    tasks, task_params = settings_of(config, "fedcross.tasks", "task")
    partitions, partition_params = settings_of(config, "fedcross.tasks.partition", "partition")
    data = tasks.load(task_params)
    sizes = [[len(part) for part in partitions.split(partition_params, data, seed).train] for seed in range(1, 21)]
    assert all(min(size) >= partition_params.min_size and len(size) == partition_params.clients for size in sizes)
