"""A machine of a real federation: its own data, or test examples only, against what the federation declares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcross.core.errors import DataError
from fedcross.tasks import arrays, femnist, folder
from fedcross.tasks.base import Task
from fedcross.tasks.data import FederatedData
from fedcross.tasks.partition import local

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def data(task: Task) -> FederatedData:
    return FederatedData(task, local.split(local.Params(), task, 0))


def pictures(root: Path, **counts: int) -> None:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (4, 4), color=10 * i).save(root / name / f"{i}.png")


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


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", other=np.zeros(2))
    with pytest.raises(DataError, match=r"data\.npz: neither x and y nor x_test and y_test"):
        arrays.load(arrays.Params(root=tmp_path))


def test_arrays_of_another_shape_or_class_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((4, 1, 2, 3), np.float32), y=np.array([0, 0, 4, 0]))
    with pytest.raises(DataError, match=r"data\.npz: inputs of shape \(1, 2, 3\), this federation's are \(1, 2, 2\)"):
        arrays.load(arrays.Params(root=tmp_path, shape=(1, 2, 2)))
    with pytest.raises(DataError, match=r"data\.npz: label 4 of example 2 is not in 0\.\.3"):
        arrays.load(arrays.Params(root=tmp_path, classes=4))


def test_a_device_trains_on_all_of_its_own_whatever_its_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((4, 3), np.float32), y=np.array([0, 1, 1, 0]))
    own = data(arrays.load(arrays.Params(root=tmp_path, test_fraction=0)))
    assert len(own.client(7, CPU)[1]) == 4


def test_folders_number_classes_as_declared_and_refuse_others(tmp_path: Path) -> None:
    pictures(tmp_path, dog=5)
    params = folder.Params(root=tmp_path, size=4, channels=1, classes=("cat", "dog"), test_fraction=0)
    task = folder.load(params)
    assert task.classes == 2
    assert task.train.y.tolist() == [1] * 5  # the device has no cats; dogs stay number 1
    pictures(tmp_path, bird=1)
    with pytest.raises(DataError, match=r"bird: not one of task\.classes"):
        folder.load(params)


def test_a_test_folder_alone_serves_the_server(tmp_path: Path) -> None:
    pictures(tmp_path / "test", cat=1, dog=2)
    task = folder.load(folder.Params(root=tmp_path, size=4, channels=1, classes=("cat", "dog")))
    assert (len(task.train), len(task.test)) == (0, 3)
    with pytest.raises(DataError, match="no training examples"):
        data(task).client(0, CPU)


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


def test_leaf_label_out_of_range_names_file_and_user(tmp_path: Path) -> None:
    for part in ("train", "test"):
        leaf(tmp_path / "femnist" / "data" / part, "w1", [62])
    with pytest.raises(DataError, match=r"all\.json: user 'w1': label 62"):
        femnist.load(femnist.Params(root=tmp_path))


def test_a_task_whose_vocabulary_comes_from_everybody_is_refused() -> None:
    from tests.tasks.test_partition import toy

    task = toy([0, 1])
    local.split(local.Params(), task, 0)
    from dataclasses import replace

    with pytest.raises(DataError, match="vocabulary or scale from all clients"):
        local.split(local.Params(), replace(task, alone=False), 0)
