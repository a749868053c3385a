import json
import os
from itertools import zip_longest
from pathlib import Path

import pytest

from fedcross.client.visit import learning_rate
from fedcross.conf import compose as composing
from fedcross.conf.cross_checks import remarks
from fedcross.conf.schema import PACKAGES, Train, load
from fedcross.core.errors import ConfigError
from fedcross.strategies.round.federation import Federation, Meeting
from tests.support import warm


def faults(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return caught.value.faults


def test_the_default_is_valid():
    config = load(())
    assert config.names["method"] == "fedcross"
    assert config.method.alpha.at(1) == 0.99  # type: ignore[attr-defined]


def test_all_faults_are_told_at_once():
    found = faults("method.alpha=2", "rounds=0", "train.lr=-1", "partition.beta=0", "device=tpu")
    assert len(found) == 5
    assert any(f.startswith("method.alpha=2") for f in found)


def test_a_fault_of_several_settings_names_one_of_them():
    (found,) = faults("method=fedcross_three_sizes", "method.shares=[1.0]")
    assert found.startswith("method.shares [1.0] are 1, widths [1.0, 0.66, 0.4] are 3; set shares")


@pytest.mark.parametrize("alpha", [0.49, -1, 1.01, 2, "nan", "high"])
def test_alpha_outside_its_range(alpha):
    (found,) = faults(f"method.alpha={alpha}")
    assert "method.alpha" in found


def test_alpha_one_is_allowed_with_a_remark():
    assert "independent training" in remarks(load(("method.alpha=1.0",)))[0]
    assert remarks(load(("method.alpha=0.9",))) == []


@pytest.mark.parametrize(("asked", "said"), [(1, "nothing bounds it"), (2, "one can stop the run"), (3, None)])
def test_a_defence_that_has_too_few_replies_to_compare_says_so(asked, said):
    found = remarks(load(("method=fedavg", f"clients_per_round={asked}", "defence.enabled=true")))
    assert [said in one for one in found] == [True] * (said is not None)
    assert remarks(load(("method=solo", f"clients_per_round={asked}", "defence.enabled=true"))) == []


def test_more_clients_a_round_than_there_are():
    (found,) = faults("clients_per_round=30", "partition.clients=20")
    assert "clients_per_round=30: the federation has 20 clients" in found


def test_a_pool_that_mixes_much_with_the_least_similar_is_not_defended():
    (found,) = remarks(load(("defence.enabled=true", "method.alpha=0.5")))
    assert "method.alpha=0.5: all take 1 - alpha of the model that differs most" in found
    (found,) = remarks(load(("defence.enabled=true", "method=fedcross_dynamic_alpha")))
    assert "method.alpha=0.5" in found
    for other in ("method.alpha=0.8", "method.selection=in_order", "method=fedavg", "defence.enabled=false"):
        alpha = () if other.startswith(("method.alpha", "method=")) else ("method.alpha=0.5",)
        assert remarks(load(("defence.enabled=true", *alpha, other))) == []


@pytest.mark.parametrize(("enough", "asked", "half"), [(3, 10, 2), (6, 10, 3), (5, 6, 3)])
def test_who_answers_first_may_be_half_of_a_round(enough, asked, half):
    settings = (f"clients_per_round={asked}", f"federation.enough_replies={enough}", "method=fedavg")
    (found,) = remarks(load((*settings, "defence.enabled=true")))
    assert f"enough_replies={enough} of {asked}" in found
    assert f"so {half} hostile devices" in found
    assert remarks(load(settings)) == []


def test_waiting_for_more_clients_than_there_are():
    (found,) = faults("partition.clients=20", "federation.min_clients=21")
    assert "federation.min_clients=21" in found


def test_rounds_that_could_only_change_nothing():
    (found,) = faults("clients_per_round=5", "federation.min_replies=6")
    assert "federation.min_replies=6" in found
    (found,) = faults("federation.min_replies=4", "federation.enough_replies=3")
    assert "federation.enough_replies=3" in found
    (found,) = faults("defence.enabled=true", "federation.enough_replies=2")
    assert "the defence needs 3 replies" in found
    load(("defence.enabled=true", "federation.enough_replies=2", "clients_per_round=2"))


def test_an_unknown_setting_of_a_part():
    (found,) = faults("+method.alfa=0.9")
    assert found == "method.alfa: unknown setting. Did you mean 'alpha'?"


def test_the_federations_settings_have_one_source():
    """The file only lists the class's fields, with its defaults; a method's own federation has the same ones."""
    listed = composing.compose(())["federation"]
    assert listed == {name: field.default for name, field in Meeting.model_fields.items()}
    assert issubclass(Federation, Meeting)
    assert not Meeting.model_fields.keys() & Federation.__annotations__.keys()
    assert all(field.description for field in Meeting.model_fields.values())


def test_resume_of_nothing():
    (found,) = faults("resume=/no/such/run")
    assert "no such run folder" in found


def test_learning_rate_decays_to_its_floor():
    train = Train(lr=1.0, lr_decay=0.5, lr_min=0.2, epochs=1, batch=1)
    assert [learning_rate(train, r) for r in (1, 2, 3, 4)] == [1.0, 0.5, 0.25, 0.2]


#: What a file leaves for the user to say.
NEEDED = {
    ("partition", "indices"): ("partition.file=owners.json",),
    ("engine", "remote"): ("engine.address=superlink:8000", "engine.authority=ca.crt"),
}
CHOICES = {group: sorted(path.stem for path in (composing.CONF / group).glob("*.yaml")) for group in PACKAGES}
#: Groups whose files do not depend on each other are composed together. A task's file chooses its model and partition.
TOGETHER = (("task", "engine"), ("method", "partition"), ("model",))


def combinations():
    """Yield choices, ``{group: name}``, so that each file of each group is chosen once."""
    for groups in TOGETHER:
        for names in zip_longest(*(CHOICES[group] for group in groups)):
            yield {group: name for group, name in zip(groups, names) if name is not None}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", list(combinations()), ids=lambda chosen: " ".join(chosen.values()))
def test_every_yaml_file_composes_and_is_valid(chosen):
    needed = [o for choice in chosen.items() for o in NEEDED.get(choice, ())]
    overrides = (*(f"{group}={name}" for group, name in chosen.items()), *needed)
    raw = composing.compose(overrides)
    config = load(overrides)
    for group in chosen:
        assert config.names[group] == raw[group]["name"]
        assert config.module(group).__name__.startswith(PACKAGES[group])


def test_every_yaml_file_is_among_them():
    assert {group for groups in TOGETHER for group in groups} == set(PACKAGES)
    chosen = [choice for combination in combinations() for choice in combination.items()]
    assert sorted(chosen) == sorted((group, name) for group, names in CHOICES.items() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((composing.CONF / "experiment").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes_and_is_valid(path: Path):
    name = path.relative_to(composing.CONF / "experiment").with_suffix("")
    load((f"experiment={name}",))


@pytest.mark.parametrize(
    "path", sorted(composing.CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_file_opens_with_its_command(path):
    first = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
    assert first.startswith("# fedcross")


EXPERIMENTS = Path(composing.CONF) / "experiment"


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.rglob("[!_]*.yaml")), ids=lambda p: p.stem)
def test_experiments_run_the_bare_methods(path):
    name = path.relative_to(EXPERIMENTS).with_suffix("")
    plain = composing.compose((f"experiment={name}",))
    assert plain["defence"]["enabled"] is False


def test_a_method_s_name_means_the_method_and_a_deployment_is_defended():
    plain = load(())
    assert not plain.defence.enabled
    assert plain.compression.exact
    assert not plain.privacy.enabled
    remote = ("engine=remote", "engine.address=superlink:8000", "engine.authority=ca.crt")
    assert load(remote).defence.enabled
    assert not load((*remote, "defence.enabled=false")).defence.enabled
    assert plain.federation.deadline_s == 3600
    assert load(remote).federation.deadline_s == 600  # nobody waits an hour for a device that is silent
    assert load((*remote, "federation.deadline_s=5")).federation.deadline_s == 5


#: What a client needs of `server`, a command line with every setting that belongs to the server: nothing of it.
SERVER_SETTINGS = {
    "output": ["output=/srv/runs/a"],
    "resume": ["resume=/srv/runs/a"],
    "stop_at": ["stop_at=7"],
    "log": ["log.format=json"],
    "serve": ["serve.page=true", "serve.port=80"],
    "logger": ["logger=wandb", "++logger.dir=/srv/wandb", "logger.nowhere=1"],
    "checkpoint": ["checkpoint.every=2", "+checkpoint.folder=/srv/c", "checkpoint.keep=0"],
    "snapshots": ["snapshots.rounds=[1]", "++snapshots.folder=/srv/s"],
    "engine": ["engine=remote", "engine.address=superlink:8000", "engine.authority=/srv/keys/ca.crt"],
    "defence": ["defence.enabled=true", "defence.weight=0"],
    "clock": ["clock=virtual"],
    "devices": ["devices=measured"],
}
ON_A_DEVICE = """
import json, sys
from fedcross.conf.compose import join
from fedcross.conf.schema import SERVER_ONLY, RunConfig, load_for_client
plain = load_for_client("task=digits train.lr=0.5").model_dump(mode="json")
found = {}
for name, settings in json.loads(sys.argv[1]).items():
    own = load_for_client(join(["task=digits", "train.lr=0.5", *settings])).model_dump(mode="json")
    found[name] = own == plain
print(json.dumps([found, sorted(SERVER_ONLY), "/srv" in json.dumps(plain)]))
"""


@pytest.mark.slow
def test_no_setting_of_the_server_reaches_a_device(tmp_path):
    """A device has other folders, another home and none of the server's paths; it must not even read the settings."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(tmp_path / "nobody"),
        "FEDCROSS_DATA": str(tmp_path / "data"),
    }
    everything = [one for settings in SERVER_SETTINGS.values() for one in settings]
    words = ["-c", ON_A_DEVICE, json.dumps({**SERVER_SETTINGS, "all": everything})]
    done = warm.run(words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    same, told, leaked = json.loads(done.stdout.splitlines()[-1])
    assert same == dict.fromkeys([*SERVER_SETTINGS, "all"], True)
    assert set(told) == set(SERVER_SETTINGS)
    assert not leaked


@pytest.mark.parametrize("user", ["somebody:hunter2", "hunter2", ":hunter2"])
def test_a_password_in_an_address_is_refused_and_not_repeated(user):
    """The run's files and the SuperLink's database would keep it."""
    (fault,) = faults("logger=mlflow", f"logger.uri='https://{user}@mlflow.example.org/a'")
    assert fault.startswith("logger.uri: ")
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in fault
    assert "hunter2" not in fault
    assert load(["logger=mlflow", "logger.uri=https://mlflow.example.org:5000/a"]).logger.model_dump()["uri"]
