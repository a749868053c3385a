"""A machine of a real federation: its own data, or test examples only, against what the federation declares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcross.core.errors import DataError
from fedcross.tasks import arrays, femnist
from fedcross.tasks.base import Task
from fedcross.tasks.data import FederatedData
from fedcross.tasks.partition import local

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def data(task: Task) -> FederatedData:
    return FederatedData(task, local.split(local.Params(), task, 0))


def leaf(path: Path, user: str, labels: list[int]) -> None:
    path.mkdir(parents=True)
    content = {"x": [[0.5] * 784 for _ in labels], "y": labels}
    text = {"users": [user], "num_samples": [len(labels)], "user_data": {user: content}}
    (path / "all.json").write_text(json.dumps(text))


def test_arrays_with_a_test_set_alone_serve_the_server(tmp_path: Path) -> None:
    x, y = np.ones((3, 1, 2, 2), np.float32), np.array([0, 1, 1])
    np.savez(tmp_path / "data.npz", x_test=x, y_test=y)
    task = arrays.load(arrays.Params(root=tmp_path, classes=4, shape=(1, 2, 2)))
    assert (len(task.train), len(task.test), task.classes, task.shape) == (0, 3, 4, (1, 2, 2))
    with pytest.raises(DataError, match="no training examples"):
        data(task).client(0, CPU)
    tested = data(task).client_test(5, CPU)
    assert tested is not None
    assert tested[1].tolist() == [0, 1, 1]


def test_a_device_trains_on_all_of_its_own_whatever_its_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((4, 3), np.float32), y=np.array([0, 1, 1, 0]))
    own = data(arrays.load(arrays.Params(root=tmp_path, test_fraction=0)))
    assert len(own.client(7, CPU)[1]) == 4


def test_leaf_on_a_device_and_on_the_server(tmp_path: Path) -> None:
    for part, labels in (("train", [3, 4, 5]), ("test", [6])):
        leaf(tmp_path / "device" / "femnist" / "data" / part, "w1", labels)
    leaf(tmp_path / "server" / "femnist" / "data" / "test", "w9", [1, 2])
    device = data(femnist.load(femnist.Params(root=tmp_path / "device")))
    assert device.client(2, CPU)[1].tolist() == [3, 4, 5]
    server = femnist.load(femnist.Params(root=tmp_path / "server"))
    assert (len(server.train), server.train.x.shape, len(server.test)) == (0, (0, 1, 28, 28), 2)
    with pytest.raises(DataError, match="no training examples"):
        data(server).client(0, CPU)
