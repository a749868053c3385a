"""Tiny ImageNet, VireoFood-172, folders of pictures and npz files."""

import numpy as np
import pytest
from PIL import Image

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


def test_tinyimagenet_damage(tmp_path):
    with pytest.raises(DataError, match=r"missing .*wnids\.txt.*task\.download=true"):
        tinyimagenet.load(tinyimagenet.Params(root=tmp_path))
    where = small_files.tinyimagenet(tmp_path)
    picture = where / "train" / "n01" / "images" / "n01_1.JPEG"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"n01_1\.JPEG: not a whole picture"):
        tinyimagenet.load(tinyimagenet.Params(root=tmp_path))
    picture.write_bytes(whole)
    annotations = where / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn77\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt: line 1: 'n77' is not a class"):
        tinyimagenet.load(tinyimagenet.Params(root=tmp_path))
    annotations.write_text("gone.JPEG\tn01\n")
    with pytest.raises(DataError, match=r"missing .*gone\.JPEG"):
        tinyimagenet.load(tinyimagenet.Params(root=tmp_path))
    (where / "wnids.txt").write_text("n01\nn02\nn03\n")
    with pytest.raises(DataError, match=r"n03/images: no \*\.JPEG of class n03"):
        tinyimagenet.load(tinyimagenet.Params(root=tmp_path))


def test_tinyimagenet_download_checks_the_published_md5(tmp_path, monkeypatch):
    import torchvision.datasets.utils as utils

    def fails(url, root, md5):
        assert (url.rsplit("/")[-1], md5) == ("tiny-imagenet-200.zip", tinyimagenet.MD5)
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(utils, "download_and_extract_archive", fails)
    with pytest.raises(DataError, match=r"download into .* failed: File not found or corrupted"):
        tinyimagenet.load(tinyimagenet.Params(root=tmp_path, download=True))


def test_vireofood172(tmp_path):
    small_files.vireofood172(tmp_path)
    task = vireofood172.load(vireofood172.Params(root=tmp_path, size=32))
    assert task.train.x.shape == (3, 3, 32, 32)
    assert task.train.y.tolist() == [0, 171, 1]
    assert task.test.y.tolist() == [171]
    assert task.label_names[171] == "dish 172"
    assert np.abs(task.train.x[1, 0].astype(int) - 172).max() < 4
    more = vireofood172.load(vireofood172.Params(root=tmp_path, size=32, validation="train"))
    assert more.train.y.tolist() == [0, 171, 1, 1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/0/0_1.jpg", r"TR\.txt: line 1: class 0 is not in 1\.\.172"),
        ("/173/0_1.jpg", r"TR\.txt: line 1: class 173 is not in 1\.\.172"),
        ("0_1.jpg", r"TR\.txt: line 1: '0_1.jpg' is not /CLASS/name"),
        ("/1/../../secret.jpg", r"TR\.txt: line 1: .* is not /CLASS/name"),
        ("/3/7_7.jpg", r"missing .*3/7_7\.jpg.*TR\.txt names them"),
    ],
)
def test_vireofood172_wrong_lists(tmp_path, line, says):
    where = small_files.vireofood172(tmp_path)
    (where / "SplitAndIngreLabel" / "TR.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=says):
        vireofood172.load(vireofood172.Params(root=tmp_path))


def test_vireofood172_missing(tmp_path):
    with pytest.raises(DataError, match=r"missing .*TR\.txt.*Ask the authors"):
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


def test_folder_with_train_and_test_and_given_classes(tmp_path):
    own_pictures(tmp_path, {"dog": 2}, "train")
    own_pictures(tmp_path, {"dog": 1}, "test")
    task = folder.load(folder.Params(root=tmp_path, classes=("cat", "dog"), size=6, channels=1))
    assert task.classes == 2
    assert task.train.y.tolist() == [1, 1]
    assert task.test.x.shape == (1, 1, 6, 6)


def test_middle_is_cropped(tmp_path):
    # 8x4 picture, left half 0, middle (columns 2..5) 100, right 200: a 4x4 crop keeps the middle
    row = np.array([0, 0, 100, 100, 100, 100, 200, 200], np.uint8)
    (tmp_path / "c").mkdir()
    Image.fromarray(np.tile(row, (4, 1))).save(tmp_path / "c" / "a.png")
    task = folder.load(folder.Params(root=tmp_path, size=4, channels=1, test_fraction=0))
    assert task.train.x.tolist() == [[[[100] * 4] * 4]]


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


def test_arrays_vectors_are_held_out_by_class(tmp_path):
    save(tmp_path, x=np.arange(20.0).reshape(10, 2), y=[0] * 5 + [1] * 5, users=np.arange(10) // 5)
    task = arrays.load(arrays.Params(root=tmp_path, classes=4))
    assert (task.classes, task.shape) == (4, (2,))
    assert task.train.x.dtype == np.float32
    assert np.bincount(task.test.y).tolist() == [1, 1]
    assert task.test.users.tolist() == [0, 1]
    assert task.prepare(task.train.x).tolist() == task.train.x.tolist()


def test_arrays_text(tmp_path):
    save(tmp_path, x=[[0, 4, 2]] * 5, y=[0] * 5)
    task = arrays.load(arrays.Params(root=tmp_path, vocabulary=5))
    assert (task.vocabulary, task.shape) == (5, (3,))
    with pytest.raises(DataError, match=r"data\.npz: x has ids from 0 to 4, not in 0\.\.3"):
        arrays.load(arrays.Params(root=tmp_path, vocabulary=4))


X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("content", "params", "says"),
    [
        ({"x": X}, {}, "no y in it; it has x"),
        ({"x": X, "y": [0, 5]}, {"classes": 5}, "label 5 of example 1 is not in 0..4"),
        ({"x": X, "y": [0, -1]}, {}, "label -1 of example 1"),
        ({"x": X, "y": [0.0, 1.0]}, {}, "y is float64"),
        ({"x": X, "y": [0]}, {}, "x has 2 examples, y 1"),
        ({"x": X, "y": [0, 1], "users": ["a"]}, {}, r"users \(1,\)"),
        ({"x": X, "y": [0, 1], "x_test": X}, {}, "x_test and y_test come together"),
        ({"x": X, "y": [0, 1], "x_test": X[:, :2], "y_test": [0, 1]}, {}, r"x_test has inputs of shape \(2,\)"),
        ({"x": X, "y": [0, 1], "x_test": X, "y_test": [0, 9]}, {"classes": 2}, "label 9 of example 1"),
        ({"x": X + np.array([[0], [np.nan]]), "y": [0, 1]}, {}, "NaN or infinite values, first in example 1"),
        ({"x": X.astype(int), "y": [0, 1]}, {}, r"x is int64 \(2, 3\), expected uint8 or float"),
        ({"x": X, "y": [0, 1]}, {"vocabulary": 3}, "must be integer"),
        ({"x": np.zeros((2, 8, 8, 3), np.uint8), "y": [0, 1]}, {}, "channels come last"),
        ({"x": np.array([[{}]], object), "y": [0]}, {}, "not a whole .npz of plain arrays"),
        ({"x": X[:0], "y": np.zeros(0, int)}, {}, "no examples"),
    ],
)
def test_arrays_faults_name_the_file(tmp_path, content, params, says):
    save(tmp_path, **content)
    with pytest.raises(DataError, match=rf"data\.npz.*{says}"):
        arrays.load(arrays.Params(root=tmp_path, **params))


def test_arrays_wrong_files(tmp_path):
    with pytest.raises(DataError, match=r"missing .*data\.npz"):
        arrays.load(arrays.Params(root=tmp_path))
    (tmp_path / "data.npz").write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"data\.npz: not a whole"):
        arrays.load(arrays.Params(root=tmp_path))
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match=r"data\.npz: one \.npy array"):
        arrays.load(arrays.Params(root=tmp_path))
