"""Digits, MNIST and CIFAR: the published formats, and what happens when a file is wrong."""

import hashlib
import pickle

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.settings import parse
from fedcross.tasks import cifar10, cifar100, digits, mnist
from fedcross.tasks.reading.params import stratified
from tests.support import small_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def test_normalisation_settings_are_checked():
    faults: list[str] = []
    assert parse(digits.Params, {"mean": [0.1, 0.2], "std": [1.0]}, "task", faults) is None
    assert parse(digits.Params, {"std": [0.0]}, "task", faults) is None
    assert parse(digits.Params, {"limit": 0}, "task", faults) is None
    assert len(faults) == 3
    with pytest.raises(ConfigError, match=r"task.mean has 3 values but the images have 1"):
        digits.load(digits.Params(mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0)))


def test_the_digits_are_those_of_scikit_learns_own_reader():
    """The digest of what ``sklearn.datasets.load_digits`` gives, split, in these types; its import takes seconds."""
    task = digits.load(digits.Params())
    parts = (task.train.x, task.train.y, task.test.x, task.test.y)
    found = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    assert found == "6323f22492cf6643611a024dac9c6ace03ecbd026397aac0b4c3c58ea026bbb7"


def test_mnist_files(tmp_path):
    made = small_files.mnist(tmp_path)
    task = mnist.load(mnist.Params(root=tmp_path))
    assert np.array_equal(task.train.x[:, 0], made["x_train"])
    assert np.array_equal(task.test.y, made["y_t10k"])
    assert task.train.y.dtype == np.int64
    assert isinstance(task.train.x, np.memmap)


def test_cifar10_files(tmp_path):
    pictures = small_files.cifar10(tmp_path)
    task = cifar10.load(cifar10.Params(root=tmp_path))
    assert np.array_equal(task.train.x, pictures)
    assert task.train.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(task.test) == 20
    assert task.label_names == tuple("abcdefghij")


def test_cifar100_fine_and_coarse(tmp_path):
    pictures = small_files.cifar100(tmp_path)
    fine = cifar100.load(cifar100.Params(root=tmp_path))
    coarse = cifar100.load(cifar100.Params(root=tmp_path, labels="coarse"))
    assert np.array_equal(fine.train.x, pictures)
    assert (fine.classes, coarse.classes) == (100, 20)
    assert fine.train.y.tolist() == list(range(40))
    assert coarse.train.y.tolist() == [i % 20 for i in range(40)]
    assert (fine.label_names[99], coarse.label_names[19]) == ("f99", "c19")


@pytest.mark.parametrize(
    ("module", "make", "name"),
    [
        (mnist, small_files.mnist, "MNIST/raw/train-images-idx3-ubyte"),
        (cifar10, small_files.cifar10, "cifar-10-batches-py/data_batch_3"),
        (cifar100, small_files.cifar100, "cifar-100-python/test"),
    ],
)
@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b"", lambda b: pickle.dumps({"data": 1})])
def test_damaged_and_missing_files_are_named(tmp_path, module, make, name, damage):
    make(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=path.name):
        module.load(module.Params(root=tmp_path))
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        module.load(module.Params(root=tmp_path))


def test_stratified_by_hand():
    # 10 zeros and 5 ones at one fifth: floor(2.5) = 2 and floor(1.5) = 1; the single two stays in training.
    y = np.array([0] * 10 + [1] * 5 + [2])
    train, test = stratified(y, 0.2, "test")
    assert np.bincount(y[test], minlength=3).tolist() == [2, 1, 0]
    assert sorted([*train, *test]) == list(range(16))
