"""The experiments of the family: every job they name is valid, one protocol for all."""

import pytest

from fedcross.conf.schema import load
from fedcross.server.identity import fingerprint
from fedcross.server.sweep import plan

#: Composes a configuration for every job.
pytestmark = pytest.mark.slow

METHODS = {"pools": 9, "rivals": 11}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_and_beta_is_a_valid_run_of_its_own(name):
    jobs = plan([], [f"experiment=family/{name}", "seed=1"]).jobs
    configs = [load(job) for job in jobs]
    assert len({fingerprint(config) for config in configs}) == METHODS[name] * 3
    assert {config.partition.model_dump()["beta"] for config in configs} == {0.1, 0.5, 1.0}
    for config in configs:
        assert (config.rounds, config.clients_per_round, config.evaluate_every) == (400, 10, 5)
        assert (config.names["task"], config.names["model"]) == ("cifar10", "lenet5")
        assert (config.train.lr, config.train.momentum, config.train.epochs, config.train.batch) == (0.01, 0.5, 5, 50)
        assert not config.defence.enabled


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("pools", ["method=fedmr", "++method.first_stage=50"]),
        ("pools", ["method=masterpull", "++method.alpha=0.97"]),
        ("rivals", ["method=fedasam", "++method.swa={start: 0.75, cycle: 10, lr: 1e-4}"]),
        ("rivals", ["method=flwr", "++method.name=FedAvgM"]),
    ],
)
def test_the_further_runs_that_the_files_name_are_valid(name, more):
    job = plan([], [f"experiment=family/{name}", "seed=1", "partition.beta=0.5", *more]).jobs
    assert len(job) == 1
    assert load(job[0]).rounds == 400
