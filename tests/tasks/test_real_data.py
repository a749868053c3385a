"""The real files, where they are: set FEDCROSS_DATA to the folder that holds them."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedcross.tasks import cifar10, femnist, shakespeare

ROOT = Path(os.environ.get("FEDCROSS_DATA", ""))

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("FEDCROSS_DATA" not in os.environ, reason="FEDCROSS_DATA does not name the folder of real data"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def test_cifar10_is_what_torchvision_reads():
    import warnings

    from torchvision.datasets import CIFAR10

    task = cifar10.load(cifar10.Params(root=ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's unpickling of old dtypes
        for part, examples in ((True, task.train), (False, task.test)):
            reference = CIFAR10(str(ROOT), train=part)  # checks all MD5s
            assert np.array_equal(examples.x, reference.data.transpose(0, 3, 1, 2))
            assert examples.y.tolist() == reference.targets
    assert np.bincount(task.train.y).tolist() == [5000] * 10
    assert task.label_names[6] == "frog"


def test_femnist_json_and_npz_agree():
    few = femnist.load(femnist.Params(root=ROOT))
    many = femnist.load(femnist.Params(root=ROOT, source="npz"))
    assert (len(few.train), len(few.test), len(few.user_names)) == (14254, 1631, 99)
    assert (len(many.train), len(many.test), len(many.user_names)) == (41495, 4763, 300)
    assert set(few.user_names) <= set(many.user_names)
    for user in ("f0424_27", "f1521_17"):  # the same writer has the same pictures in both layouts
        one, other = (task.train.users == list(task.user_names).index(user) for task in (few, many))
        assert np.array_equal(few.train.y[one], many.train.y[other])
        assert np.array_equal(few.train.x[one], many.train.x[other])


def test_shakespeare_reads_on():
    task = shakespeare.load(shakespeare.Params(root=ROOT))
    assert (len(task.train), len(task.test), len(task.user_names)) == (169660, 40218, 28)
    # A window moves by one character: the label of one is the last character of the next, within a role.
    same_role = task.train.users[1:] == task.train.users[:-1]
    agree = task.train.x[1:, -1] == task.train.y[:-1]
    assert agree[same_role].mean() > 0.99
