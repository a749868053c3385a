"""The experiments of the FedCross paper: every job they name is valid, with the paper's protocol."""

import pytest

from fedcross.conf.compose import CONF
from fedcross.conf.schema import RunConfig, load
from fedcross.core.errors import ConfigError
from fedcross.server.identity import fingerprint
from fedcross.server.sweep import plan

#: Composes many configurations or trains several federations.
pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in (CONF / "experiment" / "fedcross").glob("[!_]*.yaml"))
#: Rounds, clients, clients per round of the first job.
PUBLISHED = {
    "acceleration_small": (400, 100, 10),
    "fig4_landscape": (2000, 100, 10),
    "fig6_clients": (2000, 100, 5),
    "fig7_scale": (2000, 50, 5),
    "fig9_acceleration": (1000, 100, 10),
    "table2_cnn": (2000, 100, 10),
    "table2_femnist": (2000, 180, 18),
    "table2_resnet": (2000, 100, 10),
    "table2_text": (1000, 128, 12),
    "table2_vgg": (1000, 100, 10),
    "table3_alpha": (2000, 100, 10),
}
#: Different runs that each sweep stands for.
RUNS = {
    "acceleration_small": 5 * 3,
    "fig4_landscape": 2 * 4,
    "fig6_clients": 6 * 5 * 3,
    "fig7_scale": 6 * 4 * 3,
    "fig9_acceleration": 5 * 2 * 3,
    "table2_cnn": 2 * 6 * 4 * 3,  # three betas and IID
    "table2_femnist": 3 * 6 * 3,
    "table2_resnet": 2 * 6 * 4 * 3,
    "table2_text": 2 * 6 * 3,
    "table2_vgg": 2 * 6 * 4 * 3,
    "table3_alpha": 6 * 3 * 3,
}


def clients(config: RunConfig) -> int:
    return int(config.partition.model_dump()["clients"])


def test_every_table_and_figure_is_there():
    assert sorted(PUBLISHED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_protocol_is_the_papers(name):
    # One job of each: to compose all the others takes seconds. Table III sweeps settings of FedCross.
    method = "fedcross" if name == "table3_alpha" else "fedavg"
    config = load(plan([], [f"experiment=fedcross/{name}", f"method={method}", "seed=1"]).jobs[0])
    train = config.train
    assert (train.lr, train.momentum, train.weight_decay, train.epochs, train.batch) == (0.01, 0.5, 0.0, 5, 50)
    assert (train.lr_decay, config.evaluate_every) == (1.0, 10)
    assert (config.rounds, clients(config), config.clients_per_round) == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMES)
def test_one_of_each_job_is_valid_and_different(name):
    # Two of the methods in the large tables: all would be hundreds of jobs.
    fewer = ["method=fedprox,fedcross"] if RUNS[name] % 18 == 0 and name != "table3_alpha" else []
    jobs = plan([], [f"experiment=fedcross/{name}", "seed=1", *fewer]).jobs
    marks = {fingerprint(load(job)) for job in jobs}
    seeds = 1 if name == "fig4_landscape" else 3
    assert len(marks) * seeds * (3 if fewer else 1) == RUNS[name]


def test_fedprox_has_the_papers_mu_for_each_data_set():
    def mu(name: str, task: str) -> object:
        jobs = plan([], [f"experiment=fedcross/{name}", "method=fedprox", f"task={task}", "seed=1"]).jobs
        return load(jobs[0]).method.model_dump()["mu"]

    assert [mu("table2_cnn", task) for task in ("cifar10", "cifar100_coarse")] == [0.01, 0.001]
    assert mu("table2_femnist", "femnist") == 0.1


def test_a_tenth_of_every_federation_takes_part():
    for task, size, drawn, rounds in (("shakespeare", 128, 12, 1000), ("sent140", 803, 80, 3000)):
        config = load(["experiment=fedcross/table2_text", f"task={task}"])
        assert (clients(config), config.clients_per_round, config.rounds) == (size, drawn, rounds)
    for size in (50, 100, 200, 500, 1000):
        config = load(["experiment=fedcross/fig7_scale", f"partition.clients={size}"])
        assert config.clients_per_round == size / 10
        assert config.partition.model_dump()["min_size"] == 10
    with pytest.raises(ConfigError, match="clients_per_round=0"):  # no silent K for another size
        load(["experiment=fedcross/fig7_scale", "partition.clients=70"])


def test_fedprox_and_moon_have_each_data_sets_mu_in_single_runs_too():
    def mu(*overrides: str) -> object:
        return load(overrides).method.model_dump()["mu"]

    assert [mu("method=fedprox", f"task={task}") for task in ("femnist", "femnist_300", "cifar100", "digits")] == [
        0.1, 0.1, 0.001, 0.01,
    ]  # fmt: skip
    assert mu("experiment=fedcross/table2_femnist", "method=fedprox", "hydra.mode=RUN") == 0.1
    assert [mu("method=moon", f"task={task}") for task in ("cifar10", "cifar100", "tinyimagenet")] == [5, 1, 1]
    assert mu("method=moon", "task=cifar10", "method.mu=2") == 2
