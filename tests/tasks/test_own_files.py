"""Own data: tables, texts and data sets on disk; a fault is told in one line with file, column and row."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks import dataset, table, text
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.partition import flwr_datasets, local, natural
from tests.support.own_data import SHORT, save, write_csv, write_parquet


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


def test_parquet_gives_the_same_task_as_the_csv(tmp_path):
    write_csv(tmp_path / "data.csv", 30)
    write_parquet(tmp_path / "data.parquet", 30)
    one, other = (read(tmp_path, file=f"data.{kind}", label="kind", users="farm") for kind in ("csv", "parquet"))
    assert (one.train.x == other.train.x).all()
    assert (one.train.y == other.train.y).all()
    assert (one.test.users == other.test.users).all()


def test_columns_are_chosen_and_a_test_file_is_numbered_as_the_training_file(tmp_path):
    write_csv(tmp_path / "data.csv", 30)
    (tmp_path / "held.csv").write_text("kind,farm,wet,height,weight\nwheat,f9,1,2,3\n")
    task = read(tmp_path, label="kind", columns=("weight", "height"), test_file="held.csv")
    assert task.test.x.tolist() == [[3, 2]]
    assert task.test.y.tolist() == [1]
    assert len(task.train) == 30


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
#: content of data.csv, settings, the message (P stands for the file)
MALFORMED = {
    "missing label": (GOOD, {"label": "lable"}, "P: no column 'lable' (task.label). Did you mean 'label'?"),
    "missing column": (GOOD, {"columns": ("a", "z")}, "P: no column 'z' (task.columns). There are: a, b, label."),
    "missing owners beside a column of text": (
        "a,owner,label\n1,x,p\n2,y,q\n", {"users": "ownr"}, "P: no column 'ownr' (task.users). Did you mean 'owner'?"
    ),
    "other separator": (
        "a;label\n1;x\n2;y\n", {}, "P: no column 'label' (task.label). Did you mean 'a;label'? Is task.separator right?"
    ),
    "empty cell": (
        "a,label\n1,x\n,y\n,y\n", {},
        "P: column 'a' has 2 empty cells, first in row 2. Fill them or take these rows out.",
    ),
    "NaN": (
        "a,label\n1,x\nNaN,y\n", {},
        "P: column 'a' has 1 empty cells, first in row 2. Fill them or take these rows "
        "out."
    ),
    "infinity": (
        "a,label\n1.5,x\ninf,y\n", {},
        "P: column 'a' has 1 values that are no finite numbers, first inf in row 2. Mend them or take these rows out.",
    ),
    "too large": (
        "a,label\n1.5,x\n1e300,y\n", {},
        "P: column 'a' has 1 values that are no finite numbers, first 1e+300 in row 2. Mend them or take "
        "these rows out.",
    ),
    "mixed": (
        "a,label\n1,x\n2,y\nlow,y\n", {},
        "P: column 'a' holds text among numbers ('low' in row 3), a feature must be numbers. Turn it into numbers, or "
        "name the columns to use: task.columns=[a,b].",
    ),
    "text": (
        "a,city,label\n1,Bonn,x\n2,Ulm,y\n", {},
        "P: column 'city' holds text ('Bonn' in row 1), a feature must be numbers. Turn it into numbers, or name the "
        "columns to use: task.columns=[a,b].",
    ),
    "dates": (
        "a,day,label\n1,2024-01-01,x\n2,2024-01-02,y\n", {},
        "P: column 'day' holds values of type date32[day], a feature must be numbers. Turn it into numbers, "
        "or name the "
        "columns to use: task.columns=[a,b].",
    ),
    "one class": ("a,label\n1,x\n2,x\n", {}, "P: all labels in 'label' are 'x'. At least two classes are needed."),
    "float label": (
        "a,label\n1,0.5\n2,1.5\n", {},
        "P: the label column 'label' holds 0.5, a label must be an integer or text. Name another column with "
        "task.label.",
    ),
    "foreign label": (
        GOOD, {"classes": ("x", "z")}, "P: label 'y' in row 2 is not one of the classes. There are: x, z."
    ),
    "empty": ("", {}, "P: the file is empty. Give it a line of column names and a line for each example."),
    "names only": ("a,label\n", {}, "P: no examples in it, only column names."),
    "label alone": ("label\nx\ny\n", {}, "P: no column beside the label 'label'. Features are needed."),
    "two of a name": ("a,a,label\n1,2,x\n", {}, "P: two columns are called 'a'. Rename one."),
    "long row": (
        "a,label\n1,x\n1,2,y\n", {},
        "P: not a table with ',' between its columns (CSV parse error: Expected 2 columns, got 3: 1,2,y). "
        "Mend that line, or set task.separator.",
    ),
    "not UTF-8": (
        b"a,label\n1,x\n2,\xe9\n", {}, "P: column 'label' is not UTF-8, first in row 2. Save the file as UTF-8."
    ),
    "names not UTF-8": (b"\xe9,label\n1,x\n2,y\n", {}, "P: the column names are not UTF-8. Save the file as UTF-8."),
    "wrong scale": (GOOD, {"mean": (0,), "std": (1,)}, "task.mean has 1 values, but there are 2 features: a, b."),
    "half a scale": (GOOD, {"mean": (0,)}, "task.mean and task.std: give both, with one number per feature each."),
    "two scales": (
        GOOD, {"mean": (0, 0), "std": (1, 1), "standardise": True},
        "task.standardise=true: task.mean and task.std are given too. Leave out one of the two.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_table_is_told_in_one_line(name, tmp_path):
    content, settings, told = MALFORMED[name]
    path = tmp_path / "data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((DataError, ConfigError)) as caught:
        read(tmp_path, **settings)
    assert str(caught.value) == told.replace("P:", f"{path}:")


@pytest.mark.parametrize("kind", [table, text])
def test_a_file_that_lies_here_and_not_in_the_root_is_told_with_the_cure(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "data.csv", 30)
    (tmp_path / "lines.txt").write_text("a\tone\n")
    for name, here in (("data.csv", True), ("other.csv", False), *([("lines.txt", True)] if kind is text else [])):
        with pytest.raises(DataError, match="no such file") as told:
            kind.load(kind.Params(root=tmp_path / "data", file=name))
        assert str(told.value).endswith(" It lies in the folder where you are: task.root=.") == here


def test_files_that_are_no_tables(tmp_path):
    (tmp_path / "a.xls").write_text("x")
    (tmp_path / "a.parquet").write_text("no parquet")
    for file, words in (("a.xls", "not a kind of table"), ("a.parquet", "not a whole Parquet"), ("b.csv", "no such f")):
        with pytest.raises(DataError, match=words) as caught:
            read(tmp_path, file=file)
        assert "\n" not in str(caught.value)


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch):
    write_csv(tmp_path / "data.csv", 9)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pyarrow is not installed\. .* pip install -e '\.\[data\]'"):
        read(tmp_path, label="kind")


def test_text_lines_become_token_ids_with_the_words_of_the_training_texts(tmp_path):
    lines = [f"{('good', 'bad')[i % 2]}\tword{i % 7} and word{i % 3}, again" for i in range(20)]
    (tmp_path / "data.txt").write_text("\n".join(lines) + "\n\n")
    task = text.load(text.Params(root=tmp_path, length=4))
    assert (tuple(task.label_names), task.shape, len(task.train), len(task.test)) == (("bad", "good"), (4,), 16, 4)
    assert task.train.x.max() < task.vocabulary <= 13
    (tmp_path / "data.csv").write_text(
        "label,text\n" + "\n".join(f'{label},"{words}"' for label, _, words in map(partition, lines))
    )
    other = text.load(text.Params(root=tmp_path, file="data.csv", length=4))
    assert (other.train.x == task.train.x).all()


def partition(line: str) -> tuple[str, str, str]:
    return line.partition("\t")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "P: no texts in it. Write a line for each: label, tab, text."),
        (b"a\tone\nno label here\n", "P: line 2 has no label. Write it as label, tab, text."),
        (b"a\tone\nb\t\xff\n", "P: line 2 is not UTF-8. Save the file as UTF-8."),
        (b"a\tone\na\ttwo\n", "P: all labels in 'label' are 'a'. At least two classes are needed."),
    ],
)
def test_malformed_text_lines(content, told, tmp_path):
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        text.load(text.Params(root=tmp_path))
    assert str(caught.value) == told.replace("P:", f"{tmp_path / 'data.txt'}:")


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
    with pytest.raises(DataError, match="no such folder"):
        dataset.load(dataset.Params(root=tmp_path / "nowhere"))


def plain(n: int = 200) -> Task:
    rng = np.random.default_rng(1)
    part = Examples(np.zeros((n, 1), np.float32), rng.integers(0, 4, n), rng.integers(0, 5, n))
    return Task("plain", part, part, 4, (1,), lambda raw: raw)  # type: ignore[arg-type,return-value]


def divided(seed: int = 1, **settings):
    return flwr_datasets.split(flwr_datasets.Params(**settings), plain(), seed)


@pytest.mark.parametrize(
    ("name", "clients", "args"),
    [
        ("IidPartitioner", 8, {}),
        ("DirichletPartitioner", 6, {"alpha": 0.5}),
        ("PathologicalPartitioner", 6, {"num_classes_per_partition": 2}),
        ("ShardPartitioner", 5, {"num_shards_per_partition": 2}),
        ("LinearPartitioner", 4, {}),
        ("NaturalIdPartitioner", None, {}),
    ],
)
def test_flowers_partitioners_divide_every_example_once(name, clients, args):
    parts = divided(partitioner=name, clients=clients, args=args)
    together = np.concatenate(parts.train)
    assert len(parts) == (clients or 5)
    assert len(set(together.tolist())) == len(together) == 200


def test_the_draw_follows_from_the_runs_seed_unless_a_seed_is_given():
    chosen = {"partitioner": "DirichletPartitioner", "clients": 5, "args": {"alpha": 0.5}}
    first, again, other = divided(1, **chosen), divided(1, **chosen), divided(2, **chosen)
    assert all((a == b).all() for a, b in zip(first.train, again.train))
    assert [len(part) for part in first.train] != [len(part) for part in other.train]
    fixed = {**chosen, "args": {"alpha": 0.5, "seed": 3}}
    assert all((a == b).all() for a, b in zip(divided(1, **fixed).train, divided(2, **fixed).train))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"partitioner": "DirichletPartitoner"}, "no such partitioner. Did you mean 'DirichletPartitioner'?"),
        ({"partitioner": "DirichletPartitioner", "clients": 3}, "it needs alpha. Write +partition.args.alpha=VALUE."),
        ({"partitioner": "IidPartitioner"}, "it needs num_partitions. Write partition.clients=VALUE."),
        ({"clients": 3, "args": {"alfa": 1}}, "partition.args.alfa: IidPartitioner has no such argument."),
        ({"partitioner": "IidPartitioner", "clients": 500}, "partition.partitioner=IidPartitioner: "),
        ({"partitioner": "DirichletPartitioner", "clients": 3, "args": {"alpha": -1}}, "partitioner=Dirichlet"),
    ],
)
def test_a_partitioner_that_cannot_be_used(settings, told):
    with pytest.raises((ConfigError, DataError)) as caught:
        divided(**settings)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
