"""Your own table: a CSV, TSV or Parquet file with one row per example and named columns.

The column `label` holds integers or text. All other columns, or those in `columns`, are features and must be numbers.
``users`` names a column with the owner of each row, for ``partition=natural``. Without `test_file`, `test_fraction`
of every class is held out.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Array, Arrays, Store, cached
from fedcross.tasks.reading.params import LimitParams, Normalise
from fedcross.tasks.reading.supervised import examples, moments, put_parts
from fedcross.tasks.reading.tables import column, features, labels, owners, read_table

logger = logging.getLogger(__name__)


class Params(LimitParams):
    """Settings of a table.

    Attributes
    ----------
    root : Path
        Folder of the file.
    file : str
        Its name; the ending says what it is: .csv, .tsv, .parquet or .pq.
    test_file : str or None
        A second file, of the same columns, with the test examples; None to hold out `test_fraction`.
    label : str
        Column with the label of each example: integers or text.
    columns : tuple of str or None
        Columns with the features; None for all others.
    users : str or None
        Column with the owner of each example, for ``partition=natural``.
    classes : tuple
        All labels in the order of their numbers; empty for the sorted ones of the file. Give it wherever a device may
        lack a class.
    separator : str or None
        What separates the columns of a text file; None for a comma in .csv and a tab in .tsv.
    standardise : bool
        Whether each feature gets mean 0 and standard deviation 1, computed from the training examples.
    mean, std : tuple of float or None
        The same with numbers of your own, one per feature; on devices, where nobody sees all examples.
    test_fraction : float
        Share of every class that is held out if there is no `test_file`.
    """

    root: Path
    file: str = "data.csv"
    test_file: str | None = None
    label: str = "label"
    columns: tuple[str, ...] | None = None
    users: str | None = None
    classes: tuple[str | int, ...] = ()
    separator: str | None = Field(default=None, min_length=1, max_length=1)
    standardise: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    test_fraction: float = Field(default=0.2, ge=0, lt=1)

    def faults(self) -> list[str]:
        """Return errors that involve several of these settings."""
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            return ["task.mean and task.std: give both, with one number per feature each."]
        if self.mean is not None and self.standardise:
            return ["task.standardise=true: task.mean and task.std are given too. Leave out one of the two."]
        if 0.0 in (self.std or ()):
            return ["task.std: no division by zero is possible. Write 1 for a feature that is always the same."]
        return []


def _decode(params: Params, store: Store) -> None:
    parts: dict[str, Arrays] = {}
    names: tuple[str, ...] = ()
    classes = params.classes
    owned: dict[str, list[object]] = {}
    for part, file in (("train", params.file), ("test", params.test_file)):
        if file is None:
            continue
        path = params.root / file
        table = read_table(path, params.separator)
        label = column(table, params.label, "task.label", path)
        owner = None if params.users is None else column(table, params.users, "task.users", path)
        others = tuple(name for name in table.column_names if name not in (params.label, params.users))
        chosen = names or params.columns or others
        if not chosen:
            raise DataError(f"{path}: no column beside the label {params.label!r}. Features are needed.")
        y, classes = labels(label.to_pylist(), classes, path, params.label)
        parts[part] = {"x": features(table, chosen, path), "y": y}
        names = tuple(chosen)
        if owner is not None:
            owned[part] = owner.to_pylist()
    if owned:
        numbers, people = owners([who for part in owned.values() for who in part])
        for part, piece in zip(owned, np.split(numbers, [len(owned["train"])])):
            parts[part]["u"] = piece
        store.put("users", np.array(people))
    store.put("columns", np.array(names))
    store.put("classes", np.array([str(one) for one in classes]))
    put_parts(parts, params.test_fraction, "table test split", store)


def _scale(params: Params, x: Array, names: tuple[str, ...]) -> Normalise:
    """Return the conversion of rows to tensors."""
    mean, std = params.mean, params.std
    if params.standardise:
        mean, std = moments(x)
        logger.info("table: task.mean=%s task.std=%s", list(mean), list(std))
    if mean is None or std is None:
        return Normalise((0.0,), (1.0,), 1.0)
    if len(mean) != len(names):
        raise ConfigError(f"task.mean has {len(mean)} values, but there are {len(names)} features: {', '.join(names)}.")
    return Normalise(mean, std, 1.0)


def load(params: Params) -> Task:
    """Return the table's examples; raw inputs are float32 ``(n, features)``.

    Raises
    ------
    DataError
        If the file is missing or damaged, or a column is missing or holds what cannot be learned from; the message
        names file, column and row.
    """
    if faults := params.faults():
        raise ConfigError(faults)
    paths = [params.root / file for file in (params.file, params.test_file) if file is not None]
    for path in paths:
        if not path.is_file():
            read_table(path)  # raises the error
    keys = params.model_dump(include={"label", "columns", "users", "classes", "separator", "test_fraction"})
    arrays = cached("table", paths, keys, lambda store: _decode(params, store))
    classes = tuple(str(name) for name in arrays["classes"])
    names = tuple(str(name) for name in arrays["columns"])
    train, test = examples(arrays, len(classes), paths[0], params)
    return Task(
        name="table",
        train=train,
        test=test,
        classes=len(classes),
        shape=(len(names),),
        prepare=_scale(params, arrays["x_train"], names),
        label_names=classes,
        feature_names=names,
        user_names=tuple(str(name) for name in arrays.get("users", ())),
        alone=not params.standardise,  # mean and deviation come from everybody's rows
    )
