"""Clock, devices, method and engine must fit each other; what does not is one clear sentence."""

import pytest

from fedcross.conf.cross_checks import remarks
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.identity import describe, fingerprint
from fedcross.server.sweep import plan

ASYNC = "method=fedcross_async"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=fedavg", "clock=real"], "waits for whole rounds"),
        (["method=fedavg", "clock=replay", "clock.events=x"], "waits for whole rounds"),
        (["method=centralized", "clock=virtual"], "trains on all clients' data in one place"),
        ([ASYNC, "clock=none"], "is asynchronous"),
        ([ASYNC, "clock=real"], "engine=local simulates"),
        ([ASYNC, "clock=real", "engine=ray"], "engine=ray simulates"),
        ([ASYNC, "partition.clients=5", "clients_per_round=6"], "the federation has 5 clients"),
        ([ASYNC, "devices.shares=[0.2,0.2,0.2,0.2,0.1]"], "sum to 0.9"),
        ([ASYNC, "devices.shares=[1.2,-0.2,0,0,0]"], "0 or more"),
        ([ASYNC, "devices.shares=[0.5,0.5]"], "5 entries for 2 shares"),
        ([ASYNC, "devices=equal", "devices.training=[[0,1]]"], "above 0"),
        ([ASYNC, "devices=equal", "devices.training=[[-5,1]]"], "above 0"),
        ([ASYNC, "devices=equal", "devices.least=0"], "devices.least=0"),
        ([ASYNC, "devices=equal", "devices.training=[[5,-1]]"], "a deviation 0 or more"),
        ([ASYNC, "devices=measured", "devices.seconds_per_example=[0,1,1]"], "above 0"),
        ([ASYNC, "devices=measured", "devices.training=[[1,1],[1,1],[1,1]]"], "not both"),
        ([ASYNC, "devices=uniform", "devices.bytes_per_second=[1,1,1,1,1]"], "not both"),
        ([ASYNC, "clock.deadline_s=0"], "clock.deadline_s=0"),
        ([ASYNC, "clock.events=x"], "clock.events: clock=replay and clock.events=RUN/visits.jsonl belong together"),
        ([ASYNC, "defence.enabled=true"], "one by one"),
        ([ASYNC, "compression.down=int8"], "Compress uploads only"),
        ([ASYNC, "federation.enough_replies=2"], "federation.enough_replies"),
        ([ASYNC, "federation.hedge=1"], "federation.hedge"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    assert len(caught.value.faults) == 1
    assert words in caught.value.faults[0]


def test_a_replay_without_a_file_says_so():
    with pytest.raises(ConfigError, match=r"clock\.events"):
        load([ASYNC, "clock=replay"])


def test_runs_without_a_clock_have_the_identity_of_older_versions():
    """Neither clock nor devices count while nothing uses them; with a virtual clock both do."""
    assert not {"clock", "devices"} & describe(load(["method=fedavg"])).keys()
    assert fingerprint(load(["method=fedavg"])) == fingerprint(load(["method=fedavg", "devices=equal"]))
    virtual = [load(["method=fedavg", "clock=virtual", f"devices={name}"]) for name in ("equal", "uniform")]
    assert fingerprint(virtual[0]) != fingerprint(virtual[1])


def test_an_asynchronous_method_has_the_virtual_clock_unless_told_otherwise():
    assert load([ASYNC]).clock.name == "virtual"
    real = load([ASYNC, "clock=real", "clock.deadline_s=60", "engine=superlink"])
    assert (real.clock.name, real.clock.deadline_s) == ("real", 60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("mixes", 30), ("seeds", 36)])
def test_the_experiments_are_valid(name, count):
    configs = [load(job) for job in plan([], [f"experiment=async/{name}"]).jobs]
    assert len({fingerprint(config) for config in configs}) == count
    for config in configs:
        assert config.clock.name == "virtual"
        assert config.partition.model_dump()["beta"] == 0.5
        assert (config.rounds, config.clients_per_round, config.partition.model_dump()["clients"]) == (400, 10, 100)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=fedavg", "clock=virtual", "clock.deadline_s=5"], ["clock.deadline_s=5: method=fedavg waits"]),
        (["method=fedavg", "clock.deadline_s=5"], ["clock.deadline_s=5"]),
        (["method=fedavg", "devices=measured"], ["devices=measured: without a clock nothing takes time"]),
        (["method=fedavg", "devices=mostly_fast"], ["devices=mostly_fast"]),
        (["method=fedavg", "devices=equal"], []),
        (["method=fedavg", "clock=virtual", "devices=measured"], []),
        (["method=heterofl", "devices=three_sizes"], []),
        (["method=fedbuff", "devices=measured", "clock.deadline_s=5"], []),
    ],
)  # fmt: skip
def test_what_the_clock_does_not_use_is_told(overrides, words):
    found = remarks(load([*overrides, "defence.enabled=false"]))
    assert len(found) == len(words)
    assert all(said.startswith(word) for said, word in zip(found, words))
