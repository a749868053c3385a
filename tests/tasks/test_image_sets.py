"""Digits, MNIST and CIFAR: the published formats, and what happens when a file is wrong."""

import hashlib
import os
import pickle
import sys

import numpy as np
import pytest
import torch

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.settings import parse
from fedcross.tasks import cifar10, cifar100, digits, mnist
from fedcross.tasks.reading.params import Normalise, stratified
from tests.support import small_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def test_normalise_by_hand():
    # (51/255 - 0.1) / 0.5 = 0.2; channel two: (51/255 - 0.2) / -0.5 = 0 and (255/255 - 0.2) / -0.5 = -1.6
    raw = np.array([[[[51, 255]], [[51, 255]]]], np.uint8)
    out = Normalise((0.1, 0.2), (0.5, -0.5), 255.0)(raw)
    assert out.dtype == torch.float32
    assert torch.allclose(out, torch.tensor([[[[0.2, 1.8]], [[0.0, -1.6]]]]), atol=1e-6)


def test_normalise_feature_vectors_and_pickles():
    prepare = pickle.loads(pickle.dumps(Normalise((1.0,), (2.0,), 1.0)))
    assert torch.equal(prepare(np.array([[3.0, 5.0]], np.float32)), torch.tensor([[1.0, 2.0]]))


def test_normalisation_settings_are_checked():
    faults: list[str] = []
    assert parse(digits.Params, {"mean": [0.1, 0.2], "std": [1.0]}, "task", faults) is None
    assert parse(digits.Params, {"std": [0.0]}, "task", faults) is None
    assert parse(digits.Params, {"limit": 0}, "task", faults) is None
    assert "mean has 2 values and std 1" in faults[0]
    assert "std has a zero" in faults[1]
    assert "task.limit=0" in faults[2]
    with pytest.raises(ConfigError, match=r"task.mean has 3 values but the images have 1"):
        digits.load(digits.Params(mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0)))


def test_stratified_by_hand():
    # 10 zeros and 5 ones at one fifth: floor(2.5) = 2 and floor(1.5) = 1; the single two stays in training.
    y = np.array([0] * 10 + [1] * 5 + [2])
    train, test = stratified(y, 0.2, "test")
    assert np.bincount(y[test], minlength=3).tolist() == [2, 1, 0]
    assert sorted([*train, *test]) == list(range(16))
    assert np.array_equal(stratified(y, 0.2, "test")[1], test)


def test_digits():
    task = digits.load(digits.Params(mean=(0.5,), std=(0.5,)))
    assert len(task.train) + len(task.test) == 1797
    assert len(task.test) == 359
    assert task.train.x.shape == (1438, 1, 8, 8)
    assert task.train.x.dtype == np.uint8
    fractions = np.bincount(task.test.y) / (np.bincount(task.test.y) + np.bincount(task.train.y))
    assert np.all(np.abs(fractions - 0.2) < 0.005)
    prepared = task.prepare(task.train.x[:5])
    assert prepared.shape == (5, *task.shape)
    assert float(prepared.min()) == -1.0
    assert float(prepared.max()) == 1.0


def test_the_digits_are_those_of_scikit_learns_own_reader():
    """The digest of what ``sklearn.datasets.load_digits`` gives, split, in these types; its import takes seconds."""
    task = digits.load(digits.Params())
    parts = (task.train.x, task.train.y, task.test.x, task.test.y)
    found = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    assert found == "6323f22492cf6643611a024dac9c6ace03ecbd026397aac0b4c3c58ea026bbb7"


def test_a_scikit_learn_without_the_digits_is_told(tmp_path, monkeypatch):
    (tmp_path / "sklearn.py").touch()
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"this scikit-learn has no .*digits\.csv\.gz"):
        digits.load(digits.Params())


def test_no_augmentation_needs_no_torch_and_unknown_steps_are_found():
    assert digits.Params(augment={"flip": False, "rotate": 0.0}).augmentation() is None
    assert digits.Params(augment={"flip": True}).augmentation() is not None
    with pytest.raises(ConfigError, match="flop"):
        digits.Params(augment={"flop": False}).augmentation()


def test_limit_is_a_fixed_choice_in_order():
    small = digits.load(digits.Params(limit=50, limit_test=20))
    again = digits.load(digits.Params(limit=50, limit_test=20))
    assert (len(small.train), len(small.test)) == (50, 20)
    assert np.array_equal(small.train.x, again.train.x)


def test_mnist_files(tmp_path):
    made = small_files.mnist(tmp_path)
    task = mnist.load(mnist.Params(root=tmp_path))
    assert np.array_equal(task.train.x[:, 0], made["x_train"])
    assert np.array_equal(task.test.y, made["y_t10k"])
    assert task.train.y.dtype == np.int64
    assert isinstance(task.train.x, np.memmap)


def test_mnist_missing_names_files_and_remedy(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*and 1 more.*task\.download=true"):
        mnist.load(mnist.Params(root=tmp_path))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "not a whole idx file"),
        ("train-images-idx3-ubyte", lambda b: b"", "not a whole idx file"),
        ("train-images-idx3-ubyte", lambda b: b"\0\0\x77\x03" + b[4:], "not a whole idx file"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", r"label 10 of example 9 is not in 0\.\.9"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:7] + b"\x09" + b[8:-1], "10 inputs but 9 labels"),
    ],
)
def test_mnist_damage_names_the_file(tmp_path, name, damage, says):
    small_files.mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{name}.*{says}"):
        mnist.load(mnist.Params(root=tmp_path))


def test_cifar10_files(tmp_path):
    pictures = small_files.cifar10(tmp_path)
    task = cifar10.load(cifar10.Params(root=tmp_path))
    assert np.array_equal(task.train.x, pictures)
    assert task.train.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(task.test) == 20
    assert task.label_names == tuple("abcdefghij")


def test_cifar10_missing(tmp_path):
    with pytest.raises(DataError, match=r"data_batch_1.*and 3 more.*cifar-10-python\.tar\.gz"):
        cifar10.load(cifar10.Params(root=tmp_path))


class _Evil:
    def __reduce__(self):
        return (os.system, ("true",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda b: b[:-100], "not a whole CIFAR batch"),
        (lambda b: b"", "not a whole CIFAR batch"),
        (lambda b: pickle.dumps([1, 2]), "holds a list"),
        (lambda b: pickle.dumps({"data": 1}), "no labels in it; it has data"),
        (lambda b: pickle.dumps(_Evil()), "system does not belong in a CIFAR batch"),
        (lambda b: small_files.python2_batch(np.zeros((2, 3072), np.uint8), {"labels": [0]}), "2 images but labels"),
        (
            lambda b: small_files.python2_batch(np.zeros((1, 3071), np.uint8), {"labels": [0]}),
            r"expected uint8 .n, 3072",
        ),
        (lambda b: small_files.python2_batch(np.zeros((1, 3072), np.uint8), {"labels": [10]}), "label 10 of example 0"),
    ],
)
def test_cifar10_damage_names_the_file(tmp_path, content, says):
    small_files.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(DataError, match=f"data_batch_3.*{says}"):
        cifar10.load(cifar10.Params(root=tmp_path))


def test_cifar100_fine_and_coarse_from_one_entry(tmp_path):
    pictures = small_files.cifar100(tmp_path)
    fine = cifar100.load(cifar100.Params(root=tmp_path))
    coarse = cifar100.load(cifar100.Params(root=tmp_path, labels="coarse"))
    assert np.array_equal(fine.train.x, pictures)
    assert (fine.classes, coarse.classes) == (100, 20)
    assert fine.train.y.tolist() == list(range(40))
    assert coarse.train.y.tolist() == [i % 20 for i in range(40)]
    assert (fine.label_names[99], coarse.label_names[19]) == ("f99", "c19")
    assert (fine.name, coarse.name) == ("cifar100", "cifar100_coarse")
    assert len(list((tmp_path / "cache").glob("cifar100-*"))) == 1


def test_cifar100_coarse_label_out_of_range(tmp_path):
    small_files.cifar100(tmp_path)
    path = tmp_path / "cifar-100-python" / "test"
    labels = {"fine_labels": [99], "coarse_labels": [20]}
    path.write_bytes(small_files.python2_batch(np.zeros((1, 3072), np.uint8), labels))
    with pytest.raises(DataError, match=r"test: label 20 of example 0 is not in 0\.\.19"):
        cifar100.load(cifar100.Params(root=tmp_path))


@pytest.mark.parametrize("module", [cifar10, cifar100, mnist])
def test_download_is_left_to_torchvision(tmp_path, monkeypatch, module):
    """Only the call is checked: torchvision has the address, the bar and the checksum."""
    import torchvision

    name = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST"}[module.__name__.rpartition(".")[2]]
    asked = []

    def fails(root, train=True, download=False):
        asked.append((root, download))
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, name, fails)
    with pytest.raises(DataError, match="missing"):
        module.load(module.Params(root=tmp_path))
    assert asked == []
    with pytest.raises(DataError, match=r"download into .* failed: no network"):
        module.load(module.Params(root=tmp_path, download=True))
    assert asked == [(str(tmp_path), True)]
