"""The checked configuration: faults, warnings, and what a client gets."""

from pathlib import Path

import pytest

from fedcross.client.request import learning_rate
from fedcross.conf.compose import CONF, compose, join
from fedcross.conf.cross_checks import remarks
from fedcross.conf.schema import SERVER_ONLY, Train, load, load_for_client
from fedcross.core.errors import ConfigError
from fedcross.strategies.round.settings import FederationSettings

REMOTE = ("engine=remote", "engine.address=superlink:8000", "engine.authority=ca.crt")


def faults(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return caught.value.faults


def test_all_faults_are_told_at_once():
    found = faults("method.alpha=2", "rounds=0", "train.lr=-1", "partition.beta=0", "device=tpu")
    assert [one.split("=")[0] for one in found].count("method.alpha") == 1
    assert len(found) == 5


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["clients_per_round=30", "partition.clients=20"], "clients_per_round=30"),
        (["partition.clients=20", "federation.min_clients=21"], "federation.min_clients=21"),
        (["attack=sign_flip", "attack.clients=21"], "attack.clients=21"),
        (["clients_per_round=5", "federation.min_replies=6"], "federation.min_replies=6"),
        (["federation.min_replies=4", "federation.enough_replies=3"], "federation.enough_replies=3"),
        (["defence.enabled=true", "federation.enough_replies=2"], "federation.enough_replies=2"),
        (["+method.alfa=0.9"], "'alpha'"),
        (["method=fedcross_three_sizes", "method.shares=[1.0]"], "method.shares"),
        (["resume=/no/such/run"], "no such run folder"),
        (["resume=.", "output=/elsewhere"], "resumed run stays"),
        (["train.base=x"], "train.only"),
        (["stop.metric=test_loss"], "stop.patience"),
        (["privacy.enabled=true", "evaluate_local=true"], "evaluate_local"),
        (["privacy.enabled=true", "method=scaffold"], "scaffold"),
        (["privacy.enabled=true", "method=mofedsam"], "number of examples"),
        (["method=solo", "evaluate_clients=true"], "no global model"),
        (["method.alpha=0.49"], "method.alpha"),
        (["method=fedavg", "clock=real"], "waits for whole rounds"),
        (["method=centralized", "clock=virtual"], "in one place"),
        (["method=fedcross_async", "clock=none"], "is asynchronous"),
        (["method=fedcross_async", "clock=real"], "engine=local simulates"),
        (["method=fedcross_async", "defence.enabled=true"], "one by one"),
        (["method=fedcross_async", "compression.down=int8"], "uploads only"),
        (["method=fedcross_async", "federation.hedge=1"], "federation.hedge"),
        (["method=fedcross_async", "devices.shares=[0.5,0.5]"], "5 entries for 2 shares"),
        (["method=fedcross_async", "clock=replay"], "clock.events"),
    ],
)
def test_bad_input_is_one_clear_error(overrides, word):
    found = faults(*overrides)
    assert len(found) == 1
    assert word in found[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.alpha=1.0"], ["independent training"]),
        (["method.alpha=0.9"], []),
        (["method=fedavg", "clients_per_round=2", "defence.enabled=true"], ["so few replies"]),
        (["defence.enabled=true", "method.alpha=0.5"], ["method.alpha=0.5"]),
        (["defence.enabled=true", "method.alpha=0.5", "method.selection=in_order"], []),
        (["method=fedavg", "clock.deadline_s=5"], ["clock.deadline_s=5"]),
        (["method=fedavg", "devices=measured"], ["devices=measured"]),
        (["method=fedavg", "clock=virtual", "devices=measured"], []),
        (["method=fedbuff", "method.buffer=5000"], ["method.buffer=5000"]),
        (["privacy.enabled=true", "privacy.randomness=seed"], ["remove the noise"]),
    ],
)
def test_what_is_unusual_is_a_warning(overrides, words):
    found = remarks(load(["method=fedcross", *overrides]))
    assert len(found) == len(words)
    assert all(word in said for said, word in zip(found, words))


def test_a_methods_name_means_the_method_and_a_deployment_is_defended():
    plain = load(())
    assert not plain.defence.enabled
    assert not plain.privacy.enabled
    assert plain.compression.exact
    assert load(REMOTE).defence.enabled
    assert not load((*REMOTE, "defence.enabled=false")).defence.enabled
    assert (plain.federation.deadline_s, load(REMOTE).federation.deadline_s) == (3600, 600)


def test_the_federations_settings_have_one_source():
    listed = compose(())["federation"]
    assert listed == {name: field.default for name, field in FederationSettings.model_fields.items()}


def test_an_asynchronous_method_has_the_virtual_clock_unless_told_otherwise():
    assert load(["method=fedcross_async"]).clock.name == "virtual"
    real = load(["method=fedcross_async", "clock=real", "clock.deadline_s=60", "engine=superlink"])
    assert (real.clock.name, real.clock.deadline_s) == ("real", 60)


def test_the_learning_rate_decays_to_its_floor():
    train = Train(lr=1.0, lr_decay=0.5, lr_min=0.2, epochs=1, batch=1)
    assert [learning_rate(train, r) for r in (1, 2, 3, 4)] == [1.0, 0.5, 0.25, 0.2]


def test_no_setting_of_the_server_reaches_a_device():
    server = ["output=/srv/a", "resume=/srv/a", "stop_at=7", "stop.patience=3", "log.format=json", "serve.port=80"]
    server += ["logger=wandb", "++logger.dir=/srv/w", "checkpoint.every=2", "snapshots.rounds=[1]", "defence.weight=0"]
    server += [*REMOTE, "clock=virtual", "devices=measured", "average=ema", "average_decay=0.9", "average_from=0.1"]
    plain = load_for_client("task=digits train.lr=0.5")
    assert load_for_client(join(["task=digits", "train.lr=0.5", *server])) == plain
    assert {one.lstrip("+").split("=")[0].split(".")[0] for one in server} == SERVER_ONLY


# ---- every file ---------------------------------------------------------------------------------------------------

FILES = sorted(CONF.glob("*/[!_]*.yaml"))
EXPERIMENTS = sorted((CONF / "experiment").rglob("[!_]*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_valid_and_runs_the_bare_methods(path: Path):
    config = load((f"experiment={path.relative_to(CONF / 'experiment').with_suffix('')}",))
    assert not config.defence.enabled


def test_every_file_opens_with_its_command():
    for path in FILES:
        first = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
        assert first.startswith("# fedcross"), path


def test_a_defended_round_needs_no_more_replies_than_it_has_clients():
    """Of two clients two replies are enough, of four only from three on."""
    load(["defence.enabled=true", "clients_per_round=2", "federation.enough_replies=2"])
    with pytest.raises(ConfigError, match="enough_replies"):
        load(["defence.enabled=true", "clients_per_round=4", "federation.enough_replies=2"])
