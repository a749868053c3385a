"""Tiny ImageNet, VireoFood-172, folders of pictures and npz files."""

import numpy as np
import pytest

from fedcross.core.errors import DataError
from fedcross.tasks import arrays, folder, tinyimagenet, vireofood172
from tests.support import small_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def test_tinyimagenet(tmp_path):
    small_files.tinyimagenet(tmp_path)
    task = tinyimagenet.load(tinyimagenet.Params(root=tmp_path))
    assert task.train.x.shape == (6, 3, 64, 64)
    assert task.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert task.label_names == ("n02", "goldfish")  # labels follow wnids.txt; n02 has no words
    # colours survive JPEG within a few levels: class 1, picture 2 was (50, 40, 200)
    assert np.abs(task.train.x[5].mean(axis=(1, 2)) - [50, 40, 200]).max() < 4
    assert np.abs(task.test.x[1].astype(int) - 101).max() < 4  # a grey file becomes three equal channels
    small = tinyimagenet.load(tinyimagenet.Params(root=tmp_path, size=32))
    assert small.train.x.shape == (6, 3, 32, 32)


def test_vireofood172(tmp_path):
    small_files.vireofood172(tmp_path)
    task = vireofood172.load(vireofood172.Params(root=tmp_path, size=32))
    assert task.train.x.shape == (3, 3, 32, 32)
    assert task.train.y.tolist() == [0, 171, 1]
    assert task.test.y.tolist() == [171]
    assert task.label_names[171] == "dish 172"
    assert np.abs(task.train.x[1, 0].astype(int) - 172).max() < 4
    more = vireofood172.load(vireofood172.Params(root=tmp_path, size=32, validation_list="train"))
    assert more.train.y.tolist() == [0, 171, 1, 1]


@pytest.mark.parametrize("line", ["/0/0_1.jpg", "/173/0_1.jpg", "0_1.jpg", "/1/../../secret.jpg", "/3/7_7.jpg"])
def test_vireofood172_wrong_lists(tmp_path, line):
    where = small_files.vireofood172(tmp_path)
    (where / "SplitAndIngreLabel" / "TR.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=r"TR\.txt"):
        vireofood172.load(vireofood172.Params(root=tmp_path))


def own_pictures(root, counts, part=""):
    for name, count in counts.items():
        for i in range(count):
            small_files.picture(root / part / name / f"{i}.png", (i, 0, 255), (8, 6))


def test_folder_holds_out_of_each_class(tmp_path):
    own_pictures(tmp_path / "mine", {"cat": 5, "dog": 10})
    task = folder.load(folder.Params(root=tmp_path / "mine", size=4))
    assert task.train.x.shape == (12, 3, 4, 4)
    assert np.bincount(task.train.y).tolist() == [4, 8]
    assert np.bincount(task.test.y).tolist() == [1, 2]
    assert task.label_names == ("cat", "dog")
    everything = folder.load(folder.Params(root=tmp_path / "mine", size=4, test_fraction=0))
    assert (len(everything.train), len(everything.test)) == (15, 0)


def test_folder_faults(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        folder.load(folder.Params(root=tmp_path / "none"))
    with pytest.raises(DataError, match="no class folders"):
        folder.load(folder.Params(root=tmp_path))
    own_pictures(tmp_path, {"dgo": 1})
    with pytest.raises(DataError, match=r"dgo: not one of task\.classes\. Did you mean 'dog'"):
        folder.load(folder.Params(root=tmp_path, classes=("cat", "dog")))
    (tmp_path / "dgo" / "0.png").rename(tmp_path / "dgo" / "0.txt")
    with pytest.raises(DataError, match="no pictures in its class folders"):
        folder.load(folder.Params(root=tmp_path))


def save(path, **content):
    np.savez(path / "data.npz", **content)


def test_arrays_images_with_test_and_users(tmp_path):
    x = np.arange(4 * 9, dtype=np.uint8).reshape(4, 3, 3)
    save(tmp_path, x=x, y=[0, 1, 1, 0], x_test=x[:1], y_test=[2], users=["b", "a", "b", "b"])
    task = arrays.load(arrays.Params(root=tmp_path))
    assert task.shape == (1, 3, 3)
    assert task.classes == 3
    assert np.array_equal(task.train.x[:, 0], x)
    assert task.train.users.tolist() == [1, 0, 1, 1]
    assert task.user_names == ("a", "b")
    assert task.test.y.tolist() == [2]
    assert float(task.prepare(x[:, None]).max()) == pytest.approx(35 / 255)


X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("content", "params"),
    [
        ({"x": X}, {}),
        ({"x": X, "y": [0, 5]}, {"classes": 5}),
        ({"x": X, "y": [0.0, 1.0]}, {}),
        ({"x": X, "y": [0, 1], "users": ["a"]}, {}),
        ({"x": X, "y": [0, 1], "x_test": X}, {}),
        ({"x": X, "y": [0, 1], "x_test": X[:, :2], "y_test": [0, 1]}, {}),
        ({"x": X + np.array([[0], [np.nan]]), "y": [0, 1]}, {}),
        ({"x": X.astype(int), "y": [0, 1]}, {}),
        ({"x": X, "y": [0, 1]}, {"vocabulary": 3}),
        ({"x": [[0, 4]] * 2, "y": [0, 1]}, {"vocabulary": 4}),
        ({"x": np.zeros((2, 8, 8, 3), np.uint8), "y": [0, 1]}, {}),
        ({"x": np.array([[{}]], object), "y": [0]}, {}),
        ({"z": X}, {}),
    ],
)
def test_arrays_faults_name_the_file(tmp_path, content, params):
    save(tmp_path, **content)
    with pytest.raises(DataError, match=r"data\.npz"):
        arrays.load(arrays.Params(root=tmp_path, **params))
