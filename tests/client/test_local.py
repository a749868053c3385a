"""Local accuracy, a client's own test part, and examples drawn anew for every round."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client import cache
from fedcross.client.cache import RunCache
from fedcross.client.flat_model import ModuleNet
from fedcross.client.request import examples
from fedcross.conf.schema import load
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.objective import Objective
from fedcross.tasks.scoring import accuracy
from tests.support.federation import SMALL, run


class Sign(nn.Module):
    """Class 1 for positive inputs, class 0 for others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[-1.0], [1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.scale)


def test_accuracy_by_hand():
    # Inputs -1, 2, 3 are classes 0, 1, 1; labels 0, 1, 0: two of three, in whatever batches.
    net = ModuleNet(Sign(), torch.device("cpu"))
    data = torch.tensor([[-1.0], [2.0], [3.0]]), torch.tensor([0, 1, 0])
    objective = Objective(FedAvg.Params())
    for batch in (1, 2, 10):
        right = accuracy(lambda x: objective.predict(net, net.params, net.buffers, x, {}), *data, batch)
        assert right == pytest.approx(2 / 3)


def test_own_test_part_goes_through_the_clients_permutation():
    data = load([*SMALL, "partition=permuted", "partition.clients=6"]).load_data()
    x, y = data.client_test(2, torch.device("cpu"))
    indices = data.partition.test[2]
    raw = data.partition.transform(2, data.task.test.x[indices])
    assert torch.equal(x, data.task.prepare(raw))
    assert not torch.equal(x, data.task.prepare(data.task.test.x[indices]))
    assert np.array_equal(y.numpy(), data.task.test.y[indices])


@pytest.mark.slow
def test_an_asynchronous_round_reports_mean_and_spread(tmp_path: Path) -> None:
    found = run(tmp_path, "method=fedbuff", "evaluate_local=true", "rounds=2").driver.report.metrics
    assert {"local_accuracy", "local_accuracy_worst_tenth", "local_accuracy_std"} <= found.keys()


@pytest.mark.slow
def test_round_reports_the_participants_mean(tmp_path: Path):
    session = run(tmp_path, "evaluate_local=true", "evaluate_every=2", "rounds=3", "train.epochs=3", "train.lr=0.1")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Measured where the global model is: in round 2, and in the last.
    assert ["local_accuracy" in line for line in lines] == [False, True, True]
    assert 0.3 < lines[2]["local_accuracy"] <= 1
    assert session.driver.report.metrics["local_accuracy"] == lines[2]["local_accuracy"]
    plain = run(tmp_path / "plain", "train.epochs=3", "train.lr=0.1")
    assert "local_accuracy" not in plain.driver.report.metrics
    # Measuring changes nothing.
    ours, theirs = session.driver.global_model(), plain.driver.global_model()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_examples_are_drawn_anew_for_every_round():
    shop = RunCache(load([*SMALL, "train.examples=5"]))
    whole, labels = shop.data.client(1, shop.device)
    chosen = {}
    for number in (1, 2, 1):
        x, y = examples(shop, shop.net, 1, number)
        assert len(x) == len(y) == 5
        rows = [next(i for i in range(len(whole)) if torch.equal(whole[i], one)) for one in x]
        assert torch.equal(labels[rows], y)
        assert chosen.setdefault(number, rows) == rows  # the same round draws the same
    assert set(chosen[1]) != set(chosen[2])
    all_of_them = RunCache(load([*SMALL, "train.examples=100000"]))
    assert torch.equal(examples(all_of_them, shop.net, 1, 1)[0][:], whole)


def test_examples_stay_prepared_while_there_is_room(monkeypatch):
    shop = RunCache(load(SMALL))
    whole = [shop.data.client(i, shop.device) for i in range(3)]
    room = sum(part.nbytes for pair in whole[:2] for part in pair)
    monkeypatch.setattr(cache, "KEPT_BYTES", room)
    first = [examples(shop, shop.net, i, 1) for i in range(3)]
    again = [examples(shop, shop.net, i, 2) for i in range(3)]
    assert [a[0] is b[0] for a, b in zip(first, again)] == [True, True, False]
    assert all(torch.equal(x[:], own_x) and torch.equal(y, own_y) for (x, y), (own_x, own_y) in zip(again, whole))


def test_a_run_is_the_same_whether_examples_stay_prepared_or_not(tmp_path, monkeypatch):
    kept = run(tmp_path / "kept", "rounds=2").driver.global_model()
    monkeypatch.setattr(cache, "KEPT_BYTES", 0)
    anew = run(tmp_path / "anew", "rounds=2").driver.global_model()
    assert all(np.array_equal(kept[name], anew[name]) for name in anew)
