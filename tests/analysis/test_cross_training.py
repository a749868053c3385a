"""Cross-training in the report: several exchanges per round on every axis, and FedCT's published cells."""

import json

import pytest

from fedcross.analysis.frames import read_folder
from fedcross.analysis.published import accuracy_cells
from tests.support.fake import config, write_run


def settings(**method):
    values = {
        "method.name": "fedct", "task.name": "cifar10", "model.name": "resnet18", "partition.name": "dirichlet",
        "partition.beta": 0.1, "method.base": "fedavg", "method.broadcast": "consistency", "method.kappa": 1.0,
        "method.eta": 0.1,
    }  # fmt: skip
    return values | {f"method.{name}": value for name, value in method.items()}


@pytest.mark.parametrize(("host", "epochs"), [(None, [15.0, 30.0, 35.0]), (2, [9.0, 18.0, 23.0])])
def test_the_axes_count_every_exchange(tmp_path, host, epochs):
    # N_e = 2 with 5 local epochs: three exchanges per round, 5 + 2 * 5 epochs, or 5 + 2 * 2 if hosts train for 2. In
    # round 3 only one client was left after phase I: one exchange.
    values = config("fedct", rounds=3)
    values["method"] |= {"exchanges": 2, "host_epochs": host}
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3], values)
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, exchanges in zip(lines, (3, 3, 1)):
        line["exchanges"] = exchanges
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_folder(folder)
    assert run.axis("epochs").tolist() == epochs
    assert run.axis("exchanges").tolist() == [3.0, 6.0, 7.0]
    assert run.axis("rounds").tolist() == [1.0, 2.0, 3.0]


def test_methods_with_one_exchange_are_as_before(tmp_path):
    run = read_folder(write_run(tmp_path / "run", [0.1, 0.2]))
    assert run.axis("epochs").tolist() == [5.0, 10.0]


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
    assert {cell.value for cell in accuracy_cells(settings(**method))} == {value}


def test_an_unpublished_combination_has_no_cell():
    assert accuracy_cells(settings(kappa=0.0, base="moon")) == []
    assert accuracy_cells(settings(kappa=0.0, broadcast="random")) == []
