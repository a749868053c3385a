"""Own data: tables, texts and data sets on disk; a fault is told in one line with file, column and row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks import dataset, table, text
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.partition import flwr_datasets, local, natural
from fedcross.tasks.reading.tables import filled
from tests.support.own_data import SHORT, save, write_csv


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))


def read(folder: Path, **settings) -> Task:
    return table.load(table.Params(root=folder, **settings))


def test_a_csv_is_read_by_column_names_with_text_labels(tmp_path):
    write_csv(tmp_path / "data.csv", 50)
    task = read(tmp_path, label="kind", users="farm")
    assert (task.classes, tuple(task.label_names), task.shape) == (2, ("barley", "wheat"), (3,))
    assert (len(task.train), len(task.test)) == (40, 10)
    assert task.user_names == ("f0", "f1", "f2", "f3", "f4")
    rows = np.concatenate([task.train.x, task.test.x])
    assert rows.dtype == np.float32
    assert sorted(rows[:, 0].tolist()) == sorted(np.arange(50) * 0.5 + 1)
    assert len(natural.split(natural.Params(), task, 1)) == 5


def test_features_are_standardised_on_request_from_the_training_rows_alone(tmp_path):
    write_csv(tmp_path / "data.csv", 50)
    task = read(tmp_path, label="kind", users="farm", standardise=True)
    ready = task.prepare(task.train.x).numpy()
    assert ready.mean(axis=0) == pytest.approx([0, 0, 0], abs=1e-5)
    assert ready.std(axis=0)[:2] == pytest.approx([1, 1], abs=1e-4)
    assert not task.alone
    with pytest.raises(DataError, match=r"task\.mean and task\.std"):
        local.split(local.Params(), task, 1)
    given = read(tmp_path, label="kind", users="farm", mean=(1, 0, 0), std=(2, 1, 1))
    assert given.prepare(np.array([[3, 5, 1]], np.float32)).tolist() == [[1, 5, 1]]
    assert given.alone


GOOD = "a,b,label\n1,2,x\n3,4,y\n"
#: content of data.csv, settings, a word of the message
MALFORMED = {
    "missing label": (GOOD, {"label": "lable"}, "'label'"),
    "missing owners": ("a,owner,label\n1,x,p\n2,y,q\n", {"users": "ownr"}, "'owner'"),
    "other separator": ("a;label\n1;x\n2;y\n", {}, "task.separator"),
    "empty cell": ("a,label\n1,x\n,y\n,y\n", {}, "row 2"),
    "infinity": ("a,label\n1.5,x\ninf,y\n", {}, "row 2"),
    "mixed": ("a,label\n1,x\n2,y\nlow,y\n", {}, "'low'"),
    "text": ("a,city,label\n1,Bonn,x\n2,Ulm,y\n", {}, "task.encode=[city]"),
    "one class": ("a,label\n1,x\n2,x\n", {}, "two classes"),
    "float label": ("a,label\n1,0.5\n2,1.5\n", {}, "0.5"),
    "foreign label": (GOOD, {"classes": ("x", "z")}, "'y'"),
    "names only": ("a,label\n", {}, "no examples"),
    "label alone": ("label\nx\ny\n", {}, "label"),
    "long row": ("a,label\n1,x\n1,2,y\n", {}, "data.csv"),
    "not UTF-8": (b"a,label\n1,x\n2,\xe9\n", {}, "data.csv"),
    "wrong scale": (GOOD, {"mean": (0,), "std": (1,)}, "task.mean"),
    "half a scale": (GOOD, {"mean": (0,)}, "task.std"),
    "two scales": (GOOD, {"mean": (0, 0), "std": (1, 1), "standardise": True}, "task.standardise"),
    "unknown value": ("a,label\nu,x\nv,y\n", {"encode": {"a": ("u",)}}, "'v'"),
    "no number to fill": ("a,label\n1,x\n,y\n", {"fill": "low"}, "task.fill"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_table_is_told_in_one_line(name, tmp_path):
    content, settings, word = MALFORMED[name]
    (tmp_path / "data.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((DataError, ConfigError)) as caught:
        read(tmp_path, **settings)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


PATIENTS = "age,sex,ward,label\n30,f,Bonn,0\n,m,Ulm,1\n50,,Bonn,0\n70,m,Ulm,1\n"


def test_text_is_coded_and_empty_cells_are_filled(tmp_path):
    (tmp_path / "data.csv").write_text(PATIENTS)
    task = read(tmp_path, users="ward", encode=("sex",), fill="median", test_fraction=0)
    assert task.feature_names == ("age", "sex=f", "sex=m")
    # the median age of 30, 50 and 70; m is more frequent than f
    assert task.train.x.tolist() == [[30, 1, 0], [50, 0, 1], [50, 0, 1], [70, 0, 1]]
    assert not task.alone
    listed = read(tmp_path, columns=("sex",), encode={"sex": ("m", "f", "x")}, fill="x", test_fraction=0)
    assert listed.train.x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert listed.alone
    assert natural.split(natural.Params(), task, 1).names == ["Bonn", "Ulm"]


def test_a_large_number_fills_cells_as_it_is(tmp_path):
    (tmp_path / "data.csv").write_text("a,label\n1,x\n,y\n")
    assert read(tmp_path, fill=1234567.0, test_fraction=0).train.x.ravel().tolist() == [1, 1234567]


def test_empty_cells_of_test_rows_are_filled_from_the_training_rows(tmp_path):
    (tmp_path / "data.csv").write_text("a,label\n1,x\n3,y\n,x\n")
    (tmp_path / "test.csv").write_text("a,label\n100,x\n,y\n")
    task = read(tmp_path, test_file="test.csv", fill="mean")
    assert task.train.x.ravel().tolist() == [1, 3, 2]
    assert task.test.x.ravel().tolist() == [100, 2]


def test_text_lines_become_token_ids_with_the_words_of_the_training_texts(tmp_path):
    lines = [f"{('good', 'bad')[i % 2]}\tword{i % 7} and word{i % 3}, again" for i in range(20)]
    (tmp_path / "data.txt").write_text("\n".join(lines) + "\n\n")
    task = text.load(text.Params(root=tmp_path, length=4))
    assert (tuple(task.label_names), task.shape, len(task.train), len(task.test)) == (("bad", "good"), (4,), 16, 4)
    assert task.train.x.max() < task.vocabulary <= 13
    (tmp_path / "data.csv").write_text(
        "label,text\n" + "\n".join(f'{label},"{words}"' for label, _, words in (line.partition("\t") for line in lines))
    )
    other = text.load(text.Params(root=tmp_path, file="data.csv", length=4))
    assert (other.train.x == task.train.x).all()


@pytest.mark.parametrize("content", [b"", b"a\tone\nno label here\n", b"a\tone\nb\t\xff\n", b"a\tone\na\ttwo\n"])
def test_malformed_text_lines(content, tmp_path):
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.txt"):
        text.load(text.Params(root=tmp_path))


@pytest.mark.slow
def test_data_sets_on_disk(tmp_path):
    """Numbers, arrays, texts and pictures, with a ClassLabel or text as label; a DatasetDict's own test part."""
    save(tmp_path)
    numbers = dataset.load(dataset.Params(root=tmp_path / "numbers"))
    assert (numbers.shape, numbers.classes) == ((2,), 2)
    assert (len(numbers.train), len(numbers.test)) == (SHORT * 4 // 5, SHORT // 5)
    arrays = dataset.load(dataset.Params(root=tmp_path / "arrays"))
    assert (arrays.shape, len(arrays.train), len(arrays.test)) == ((1, 4, 5), SHORT, 3)
    assert arrays.label_names == ("no", "yes")
    words = dataset.load(dataset.Params(root=tmp_path / "texts", length=3, users="who"))
    assert (words.shape, words.user_names) == ((3,), ("a", "b"))
    assert 0 < words.train.x.max() < words.vocabulary
    pictures = dataset.load(dataset.Params(root=tmp_path / "pictures", size=6))
    assert (pictures.shape, pictures.train.x.dtype) == ((3, 6, 6), np.uint8)
    with pytest.raises(DataError, match="no column 'nope'"):
        dataset.load(dataset.Params(root=tmp_path / "numbers", label="nope"))
    with pytest.raises(DataError, match="not a data set that save_to_disk wrote"):
        dataset.load(dataset.Params(root=tmp_path))
    with pytest.raises(DataError, match="nowhere"):
        dataset.load(dataset.Params(root=tmp_path / "nowhere"))


def plain(n: int = 200) -> Task:
    rng = np.random.default_rng(1)
    part = Examples(np.zeros((n, 1), np.float32), rng.integers(0, 4, n), rng.integers(0, 5, n))
    return Task("plain", part, part, 4, (1,), lambda raw: raw)  # type: ignore[arg-type,return-value]


def divided(seed: int = 1, **settings):
    return flwr_datasets.split(flwr_datasets.Params(**settings), plain(), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "clients", "args"),
    [("IidPartitioner", 8, {}), ("DirichletPartitioner", 6, {"alpha": 0.5}), ("NaturalIdPartitioner", None, {})],
)
def test_flowers_partitioners_divide_every_example_once(name, clients, args):
    parts = divided(partitioner=name, clients=clients, args=args)
    together = np.concatenate(parts.train)
    assert len(parts) == (clients or 5)
    assert len(set(together.tolist())) == len(together) == 200


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"partitioner": "DirichletPartitoner"}, "Did you mean 'DirichletPartitioner'?"),
        ({"partitioner": "DirichletPartitioner", "clients": 3}, "'alpha'"),
        ({"partitioner": "IidPartitioner"}, "'num_partitions'"),
        ({"clients": 3, "args": {"alfa": 1}}, "'alfa'"),
        ({"partitioner": "IidPartitioner", "clients": 500}, "partition.partitioner=IidPartitioner: "),
        ({"partitioner": "DirichletPartitioner", "clients": 3, "args": {"alpha": -1}}, "partitioner=Dirichlet"),
    ],
)
def test_a_partitioner_that_cannot_be_used(settings, told):
    with pytest.raises((ConfigError, DataError)) as caught:
        divided(**settings)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_cells_are_filled_by_what_the_training_rows_say():
    table = pd.DataFrame({"a": [1.0, 3.0, None, 100.0]})
    assert filled(table, ["a"], table[:2], "mean")["a"].tolist() == [1.0, 3.0, 2.0, 100.0]


def test_a_feature_with_one_value_is_standardised_to_zero(tmp_path):
    (tmp_path / "data.csv").write_text("a,b,label\n1,7,x\n3,7,y\n")
    task = read(tmp_path, standardise=True, test_fraction=0)
    assert task.prepare(task.train.x).tolist() == [[-1, 0], [1, 0]]
