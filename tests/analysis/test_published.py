"""Which published cell belongs beside a configuration."""

from typing import Any

import pytest

from fedcross.analysis.published import accuracy_cells, cells, deviations, published_rounds, verdicts
from fedcross.analysis.records import load_runs
from fedcross.analysis.runs import flatten
from tests.support.fake import config, write_run


def settings(method: str, **changes: Any) -> dict[str, Any]:
    return flatten(config(method, rounds=changes.pop("rounds", 2000), **changes))


def values(found: dict[str, Any]) -> list[tuple[str, float]]:
    return [(cell.source, cell.value) for cell in accuracy_cells(found)]


def test_the_table_is_read_whole():
    assert len(cells()) == 390
    assert {cell.source.split(" ")[0] for cell in cells()} == {"FedCross", "FedCT", "FedFusion"}


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("fedavg", {}, [("FedCross Table II", 54.78)]),
        ("fedavg", {"model__name": "lenet5", "partition__beta": 0.1}, [("FedCross Table II", 46.12)]),
        ("fedcross", {}, [("FedCross Table II", 62.16), ("FedCross Table III", 62.16)]),
        ("fedcross", {"method__alpha": 0.9}, [("FedCross Table III", 58.61)]),
        ("fedcross", {"method__selection": "highest"}, [("FedCross Table III", 49.70)]),
        ("fedcross", {"method__selection": "in_order", "method__alpha": 0.5}, [("FedCross Table III", 56.42)]),
        ("fedcross", {"method__acceleration": "pm"}, []),
        ("fedcross", {"method__alpha": 0.7}, []),
        ("fedcross", {"partition__beta": 0.7}, []),
        ("fedcross", {"method__alpha": 0.9, "partition__beta": 0.5}, []),
        ("fedcross", {"model__name": "resnet20", "partition__beta": 0.3}, []),
        ("fedcross", {"model__name": "resnet20_lab", "partition__beta": 0.1}, [("FedCross Table II", 53.79)]),
        ("fedavg", {"model__name": "vgg16_bn", "partition__beta": 0.1}, [("FedCross Table II", 63.79)]),
        ("fedcross", {"task__name": "digits"}, []),
        ("fedavg", {"task__name": "femnist", "model__name": "lenet5"}, []),
    ],
)
def test_matching(method: str, changes: dict[str, Any], expected: list[tuple[str, float]]):
    assert values(settings(method, **changes)) == expected


def test_iid_has_no_beta():
    found = settings("fedcross")
    found["partition.name"] = "iid"
    assert values(found) == [("FedCross Table II", 62.97)]
    del found["partition.beta"]
    assert values(found) == [("FedCross Table II", 62.97)]


def test_fedct_takes_its_base_and_broadcast_from_the_method():
    found = settings("fedct", model__name="resnet18", partition__beta=0.5)
    assert ("FedCT Table V", 88.21) in values(found)
    assert ("FedCT Table IV", 87.78) not in values(found)
    assert not any("Table III" in source for source, _ in values(found))  # an ablation is never guessed
    assert ("FedCT Table IV", 87.78) in values(found | {"method.broadcast": "random"})


def test_ten_clients_in_every_round_are_fedcts_protocol():
    """Another network then stands beside FedCT's, and is named; FedCross's tables have 100 clients."""
    found = settings("fedexg", model__name="lenet5", partition__beta=0.5)
    found |= {"partition.clients": 10, "clients_per_round": 10}
    cell = accuracy_cells(found)[0]
    assert (cell.source, cell.value) == ("FedCT Table I", 86.04)
    assert deviations(cell, found)[0] == "model lenet5 (paper resnet18)"
    assert not [source for source, _ in values(found | {"method.name": "fedavg"}) if "FedCross" in source]
    assert values(found | {"clients_per_round": 5}) == []


def test_cut_models_and_a_first_stage_are_told():
    found = settings("fedcross") | {"method.widths": [0.4], "method.first_stage": 100}
    assert deviations(accuracy_cells(found)[0], found) == [
        "first_stage 100 (paper 0)",
        "widths 0.4 (paper full models)",
    ]
    assert deviations(accuracy_cells(found)[0], found | {"method.widths": [1.0], "method.first_stage": 0}) == []


def test_deviations_from_the_paper_are_told():
    found = settings("fedavg", rounds=200, train__lr=0.1)
    assert deviations(accuracy_cells(found)[0], found) == ["lr 0.1 (paper 0.01)", "rounds 200 (paper 2000)"]
    found = settings("fedavg")
    assert deviations(accuracy_cells(found)[0], found) == []


def test_what_no_paper_has_is_told():
    found = settings("fedavg") | {"defence.enabled": True, "compression.up": "int8", "privacy.enabled": True}
    assert deviations(accuracy_cells(found)[0], found | {"task.limit": 500}) == [
        "limit 500 (paper all)",
        "defence on (paper none)",
        "privacy on (paper none)",
        "compression of uploads int8 (paper none)",
    ]


def test_each_data_set_has_the_paper_s_clients_and_all_of_its_data():
    found = settings("fedavg", task__name="shakespeare", model__name="lstm", partition__name="natural", rounds=1000)
    text = found | {"partition.clients": 28, "clients_per_round": 3, "train.examples": 1280, "task.limit_test": 4000}
    assert deviations(accuracy_cells(text)[0], text) == [
        "clients_per_round 3 (paper 12)",
        "clients 28 (paper 128)",
        "limit_test 4000 (paper all)",
        "examples 1280 (paper all)",
    ]
    paper = found | {"partition.clients": 128, "clients_per_round": 12, "task.limit": None}
    assert deviations(accuracy_cells(paper)[0], paper) == []


@pytest.mark.parametrize(("labels", "expected"), [("coarse", []), ("fine", ["fine labels (paper coarse)"])])
def test_cifar100_of_fedcross_is_coarse(labels: str, expected: list[str]):
    found = settings("fedavg", task__name="cifar100", task__labels=labels)
    assert deviations(accuracy_cells(found)[0], found) == expected


def test_published_rounds_to_a_target():
    # FedCT Table VI: FedAvg on CIFAR-10 needs 127 rounds to 76 % at beta .1 and 107 to 85 % at beta .5.
    found = settings("fedavg", model__name="resnet18", partition__beta=0.1)
    cell = published_rounds(found, 0.76)
    assert cell is not None
    assert cell.value == 127
    assert published_rounds(found, 0.85) is None
    found = settings("fedavg", model__name="resnet18", partition__beta=0.5, task__name="cifar100")
    cell = published_rounds(found, 0.55)
    assert cell is not None
    assert (cell.source, cell.value) == ("FedCT Table VI", 127)


def test_every_cell_about_rounds_has_a_target():
    targets = {cell.source: cell.target for cell in cells() if cell.quantity.startswith("rounds to")}
    assert set(targets) == {"FedCT Table IV", "FedCT Table VI", "FedFusion Table 2"}
    about = [cell for cell in cells() if cell.quantity.startswith("rounds to")]
    assert {cell.target for cell in about if cell.source == "FedFusion Table 2"} == {0.94, 0.95}
    assert {cell.target for cell in about if cell.source == "FedCT Table IV"} == {0.88, 0.57}
    assert {cell.target for cell in about if cell.source == "FedCT Table VI"} == {0.76, 0.85, 0.54, 0.55}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"method.k": 40}, "k 40 (paper one for each client of a round)"),
        ({"method.global_model": "uploads"}, "global_model uploads (paper mixed)"),
        ({"method.mode": "propellers"}, "mode propellers (paper cross)"),
        ({"method.independent_start": True}, "independent initial models (public code copies of one)"),
    ],
)
def test_a_pool_that_is_kept_in_another_way_is_told(setting, told):
    found = settings("fedcross")
    (cell, *_) = accuracy_cells(found)
    usual = {"method.k": None, "method.global_model": "mixed", "method.mode": "cross"}
    assert deviations(cell, found | usual) == deviations(cell, found)
    assert set(deviations(cell, found | usual | setting)) - set(deviations(cell, found)) == {told}


@pytest.mark.parametrize(
    ("rounds", "accuracies", "verdict"),
    [
        (2000, (0.548, 0.55), "agrees"),  # FedAvg at Dirichlet 1.0: 54.78
        (2000, (0.60, 0.601), "differs"),
        (2000, (0.60, 0.52, 0.58), "agrees"),  # 57 +- 10 points
        (999, (0.548, 0.55), "too short"),
    ],
)
def test_a_verdict_on_a_published_cell(tmp_path, rounds, accuracies, verdict):
    for seed, accuracy in enumerate(accuracies, start=1):
        folder = write_run(tmp_path / str(seed), [accuracy], config("fedavg", seed, rounds))
        lines = (folder / "metrics.jsonl").read_text().replace('"round": 1,', f'"round": {rounds},')
        (folder / "metrics.jsonl").write_text(lines)
    runs, _ = load_runs([tmp_path], unfinished=True)
    table = verdicts(runs)
    row = table[(table["seeds"] > 0) & (table["quantity"] == "test accuracy %")].iloc[0]
    assert (row["verdict"], row["seeds"], row["published_rounds"]) == (verdict, len(accuracies), 2000)
    assert (row["difference"] == row["difference"]) == (verdict != "too short")
    assert (table["verdict"] == "no data").sum() == len(cells()) - (table["seeds"] > 0).sum()


def fedct(**method):
    values = {
        "method.name": "fedct", "task.name": "cifar10", "model.name": "resnet18", "partition.name": "dirichlet",
        "partition.beta": 0.1, "method.base": "fedavg", "method.broadcast": "consistency", "method.kappa": 1.0,
        "method.eta": 0.1,
    }  # fmt: skip
    return values | {f"method.{name}": value for name, value in method.items()}


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ({}, 78.22),
        ({"base": "moon"}, 78.68),
        ({"kappa": 0.0, "eta": 0.0}, 75.42),
        ({"kappa": 0.0}, 76.02),
        ({"eta": 0.0}, 77.36),
    ],
)
def test_fedcts_cells_belong_to_their_modules(method, value):
    assert {cell.value for cell in accuracy_cells(fedct(**method))} == {value}


def test_an_unpublished_combination_has_no_cell():
    assert accuracy_cells(fedct(kappa=0.0, base="moon")) == []
    assert accuracy_cells(fedct(kappa=0.0, broadcast="random")) == []
