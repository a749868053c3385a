"""The experiments of the FedCT paper: they compose for every method they name, with the paper's protocol."""

from pathlib import Path

import pytest
import yaml

from fedcross.conf.compose import CONF
from fedcross.conf.schema import load
from fedcross.server.check import checked_plan

#: Experiments of this project, not of the paper.
OURS = ["order", "order_host_lr", "order_lenet5"]
NAMES = sorted(path.stem for path in (CONF / "experiment" / "fedct").glob("[!_]*.yaml"))


def params(name: str) -> dict[str, str]:
    text = Path(CONF / "experiment" / "fedct" / f"{name}.yaml").read_text()
    return {key: str(value) for key, value in yaml.safe_load(text)["hydra"]["sweeper"]["params"].items()}


def test_every_table_and_figure_is_there():
    papers = [
        "analyses", "fig5_exchanges", "fig6_scale", "sensitivity", "table1", "table3_ablation", "table4_broadcast",
        "table5_heterogeneity", "table6_rounds",
    ]  # fmt: skip
    assert sorted([*papers, *OURS]) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OURS])
def test_the_protocol_is_the_papers(name):
    config = load([f"experiment=fedct/{name}", "method=fedct"])
    train = config.train
    assert (train.lr, train.momentum, train.weight_decay, train.epochs, train.batch) == (0.01, 0.9, 1e-5, 10, 64)
    assert (config.names["model"], config.names["task"], config.clients_per_round) == ("resnet18", "cifar10", 10)
    assert config.partition.clients == 10  # type: ignore[attr-defined]
    assert config.task.model_dump()["augment"]["crop_padding"] == "reflect"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_job_of_the_sweep_is_valid(name):
    # One setting at a time: the product of all would be hundreds of jobs.
    choices = {key: values.split(",") for key, values in params(name).items() if key != "seed"}
    for key, values in choices.items():
        rest = [f"{other}={several[0]}" for other, several in choices.items() if other != key]
        assert checked_plan(["-m", f"experiment=fedct/{name}", *rest, f"{key}={','.join(values)}"]).overrides


@pytest.mark.parametrize(
    ("method", "kappa", "eta", "base"),
    [
        ("fedct", 1.0, 0.1, "fedavg"),
        ("fedct_cakb", 0.0, 0.0, "fedavg"),
        ("fedct_cakb_mfa", 0.0, 0.1, "fedavg"),
        ("fedct_cakb_mvkgrl", 1.0, 0.0, "fedavg"),
        ("fedct_moon", 1.0, 0.1, "moon"),
    ],
)
def test_the_ablations_are_settings_of_one_method(method, kappa, eta, base):
    config = load(["experiment=fedct/table3_ablation", f"method={method}"])
    chosen = config.method.model_dump()
    assert (chosen["kappa"], chosen["eta"], chosen["base"]) == (kappa, eta, base)
    assert config.names["method"] == config.modules["method"] == "fedct"
