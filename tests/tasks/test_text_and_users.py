"""LEAF's data sets: FEMNIST, Shakespeare and Sent140, and what happens when a file is wrong."""

import json
import logging

import numpy as np
import pytest
import torch

from fedcross.core.errors import DataError
from fedcross.tasks import femnist, sent140, shakespeare
from fedcross.tasks.reading.words import WordParams, split_words, text_arrays, vocabulary, word_ids
from tests.support import small_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def test_femnist_leaf(tmp_path):
    small_files.femnist(tmp_path)
    task = femnist.load(femnist.Params(root=tmp_path, mean=(0.5,), std=(-0.5,)))
    assert task.user_names == ("w0", "w1", "w2")
    assert task.train.x.shape == (5, 1, 28, 28)
    assert task.train.x[:, 0, 0, 0].tolist() == [7, 8, 1, 0, 255]
    assert task.train.y.tolist() == [61, 0, 10, 5, 6]
    assert task.train.users.tolist() == [2, 2, 1, 0, 0]
    assert task.test.users.tolist() == [1, 2]
    assert (task.label_names[0], task.label_names[10], task.label_names[61]) == ("0", "A", "z")
    # the authors' (0.5 - x) / 0.5: paper (x = 1) is -1, full ink (x = 0) is +1
    prepared = task.prepare(task.train.x[3:4])
    assert prepared[0, 0, 0, 0] == 1.0
    assert prepared[0, 0, 5, 5] == -1.0


def test_femnist_npz(tmp_path):
    (tmp_path / "femnist").mkdir()
    x = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    np.savez(
        tmp_path / "femnist" / "few.npz",
        x=x,
        y=np.array([9, 8, 7, 6, 5], np.uint8),
        users=np.array(["b", "a"]),
        num_samples=np.array([3, 2]),
        num_train=np.array([2, 1]),
    )
    task = femnist.load(femnist.Params(root=tmp_path, source="npz", file="few.npz"))
    # writer b has rows 0, 1, 2 (two for training), writer a rows 3, 4 (one for training); a is user 0
    assert task.train.x[:, 0, 0, 0].tolist() == [0, 1, 3]
    assert task.train.y.tolist() == [9, 8, 6]
    assert task.train.users.tolist() == [1, 1, 0]
    assert task.test.y.tolist() == [7, 5]


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: "{",
        lambda c: json.dumps({**c, "num_samples": [3, 1]}),
        lambda c: json.dumps({**c, "user_data": {}}),
        lambda c: json.dumps(c).replace("[61, 0]", "[62, 0]"),
        lambda c: json.dumps(c).replace("[61, 0]", "[0.5, 0]"),
        lambda c: json.dumps(c).replace("1.0, 1.0", "1.0", 1),
        lambda c: json.dumps(c).replace("1.0, 1.0", "1.0, NaN"),
    ],
)
def test_femnist_damage_names_the_file(tmp_path, damage):
    small_files.femnist(tmp_path)
    path = tmp_path / "femnist" / "data" / "train" / "all_data_0.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(DataError, match=r"all_data_0\.json"):
        femnist.load(femnist.Params(root=tmp_path))


def plays(root, **roles):
    folder = root / "shakespeare" / "data"
    small_files.leaf(folder, "test", {"HAMLET": (["a" * 80], ["b"])})
    return small_files.leaf(folder, "train", roles)


def test_shakespeare(tmp_path):
    text = "To be, or not to be: that is the question: Whether 'tis nobler in the mind to su"
    assert len(text) == 80
    plays(tmp_path, HAMLET=([text, text[1:] + "f"], ["f", "f"]), OPHELIA=(["\n" * 80], ["}"]))
    task = shakespeare.load(shakespeare.Params(root=tmp_path))
    assert (task.vocabulary, task.classes, task.shape) == (80, 80, (80,))
    assert "".join(shakespeare.ALPHABET[i] for i in task.train.x[0]) == text
    assert task.train.y.tolist() == [shakespeare.ALPHABET.index("f")] * 2 + [79]
    assert task.train.x[2].tolist() == [0] * 80
    assert task.train.users.tolist() == [0, 0, 1]
    prepared = task.prepare(task.train.x)
    assert prepared.dtype == torch.int64
    assert prepared.shape == (3, 80)


@pytest.mark.parametrize(
    ("x", "y"), [("a" * 79, "b"), ("a" * 80, "bc"), ("a" * 79 + "\t", "b"), ("?" + "a" * 78 + "\u20ac", "b"), (5, "b")]
)
def test_shakespeare_damage_names_file_and_role(tmp_path, x, y):
    plays(tmp_path, OPHELIA=([x], [y]))
    with pytest.raises(DataError, match=r"all_data_0\.json: user 'OPHELIA'"):
        shakespeare.load(shakespeare.Params(root=tmp_path))


def tweet(text):
    return ["123", "Mon Apr 06 2009", "NO_QUERY", "user", text, "training"]


def test_words_by_hand():
    assert split_words("It's FINE, isn't it?! @you") == ["it's", "fine", ",", "isn't", "it", "?", "!", "you"]
    words = vocabulary([["b", "a", "b"], ["a", "c"]], size=4)
    assert words == ["<pad>", "<unknown>", "a", "b"]  # a and b twice each, by name; c does not fit
    # padded on the left to 3; only the first three words are read
    assert word_ids([["a", "c"], [], ["b", "b", "a", "a"]], words, 3).tolist() == [[0, 2, 1], [0, 0, 0], [3, 3, 2]]


def test_the_vocabulary_has_no_word_of_a_text_that_is_held_out():
    labels = np.array([0, 1] * 10)
    arrays = text_arrays({"train": {"y": labels}}, {"train": [f"w{i}" for i in range(20)]}, WordParams(length=1), 0.2)
    assert len(arrays["words"]) == 2 + 16  # with those for padding and unknown words
    assert (arrays["x_test"] == 1).all()


def test_sent140_split_files(tmp_path):
    folder = tmp_path / "sent140" / "data"
    small_files.leaf(folder, "train", {"u1": ([tweet("good good day")], [1]), "u0": ([tweet("bad day")], [0])})
    small_files.leaf(folder, "test", {"u1": ([tweet("bad night")], [0])})
    task = sent140.load(sent140.Params(root=tmp_path, length=3))
    # by count, then by name: day 2, good 2, bad 1; night is only in the test text, hence unknown
    assert task.vocabulary == 5
    assert task.train.x.tolist() == [[3, 3, 2], [0, 4, 2]]
    assert task.test.x.tolist() == [[0, 4, 1]]
    assert task.train.y.tolist() == [1, 0]
    assert task.train.users.tolist() == [1, 0]


def test_sent140_whole_file_holds_out_of_each_author(tmp_path):
    users = {
        f"u{i}": ([tweet(f"word{i} x{j}") for j in range(n)], [j % 2 for j in range(n)])
        for i, n in enumerate((1, 2, 11))
    }
    path = small_files.leaf(tmp_path / "sent140", "data", users)
    path.rename(path.with_name("all_data.json"))
    task = sent140.load(sent140.Params(root=tmp_path))
    # ceil(n / 10) held out, but an author of one keeps it: 0, 1 and 2
    assert np.bincount(task.train.users).tolist() == [1, 1, 9]
    assert np.bincount(task.test.users, minlength=3).tolist() == [0, 1, 2]


def test_sent140_glove(tmp_path, caplog):
    folder = tmp_path / "sent140"
    small_files.leaf(folder / "data", "train", {"u": ([tweet("good day xyzzy"), tweet("day")], [1, 0])})
    small_files.leaf(folder / "data", "test", {"u": ([tweet("good")], [1])})
    (folder / "g.txt").write_text("the 9 9\nday 1 2\ngood 3 -4.5\n")
    with caplog.at_level(logging.INFO):
        task = sent140.load(sent140.Params(root=tmp_path, length=3, glove="g.txt"))
    assert task.train.x.tolist() == [[3, 2, 1], [0, 0, 2]]  # day twice, good once; xyzzy has no vector
    [vectors] = (tmp_path / "cache").glob("sent140-*/vectors.npy")
    assert f"model.vectors={vectors}" in caplog.text
    assert np.load(vectors).tolist() == [[0, 0], [0, 0], [1, 2], [3, -4.5]]
