"""Your own table: a CSV, TSV or Parquet file with one row per example and named columns.

The column `label` holds integers or text. All other columns, or those in `columns`, are features: numbers, or text
that `encode` codes. ``users`` names a column with the owner of each row (a site), for ``partition=natural``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Array, Arrays, cached
from fedcross.tasks.reading.params import Normalise, finished, split_parts, stratified
from fedcross.tasks.reading.tables import (
    FILLS,
    TableParams,
    categories_of,
    coded,
    filled,
    labelled,
    read_table,
    text_of,
)

logger = logging.getLogger(__name__)
PURPOSE = "table test split"
#: Columns are unscaled if their largest deviation from 0 differs by more than this factor, or is larger.
UNSCALED = 20.0


class Params(TableParams):
    """Settings of a table.

    Attributes
    ----------
    columns : tuple of str or None
        Columns with the features; None for all others.
    separator : str or None
        What separates the columns of a text file; None for a comma in .csv and a tab in .tsv.
    encode : sequence or mapping
        Text columns, each coded as one feature of zeros and ones per value: ``[sex]`` for the values in the file, or
        ``{sex: [f, m]}`` with the values, which devices need.
    fill : str or None
        How empty cells are filled: ``mean``, ``median``, ``most_frequent`` (of the rows to train on) or a value; None
        refuses them.
    standardise : bool
        Whether each feature gets mean 0 and standard deviation 1, computed from the training examples.
    mean, std : tuple of float or None
        The same with numbers of your own, one per feature; on devices, where nobody sees all examples.
    """

    file: str = "data.csv"
    columns: tuple[str, ...] | None = None
    separator: str | None = Field(default=None, min_length=1, max_length=1)
    encode: dict[str, tuple[str | int, ...]] | tuple[str, ...] | None = None
    fill: str | float | None = None
    standardise: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def alone(self) -> bool:
        """Whether one device's rows are prepared as all others are: nothing is computed from everybody's rows."""
        listed = isinstance(self.encode, Mapping) or not self.encode
        return listed and not self.standardise and self.fill not in FILLS


def _decode(params: Params, paths: dict[str, Path]) -> Arrays:
    tables = {part: read_table(path, params.separator) for part, path in paths.items()}
    train, where = tables["train"], paths["train"]
    parts, names = labelled(tables, params, params.classes, where)
    columns = params.columns or [name for name in train.columns if name not in (params.label, params.users)]
    if not columns:
        raise DataError(f"{where}: no column beside the label {params.label!r}. Features are needed.")
    if "test" not in tables:  # what fills cells comes from the rows to train on alone
        train = train.iloc[stratified(parts["train"]["y"], params.test_fraction, PURPOSE)[0]]
    fill = params.fill if params.fill is None else text_of(params.fill)
    full = {part: filled(table, columns, train, fill) for part, table in tables.items()}
    if isinstance(params.encode, Mapping):
        categories = {name: [str(value) for value in values] for name, values in params.encode.items()}
    else:
        categories = categories_of(full["train"], params.encode or (), where)
    for part, table in full.items():
        parts[part]["x"], features = coded(table, columns, categories, paths[part])
    return {**split_parts(parts, params.test_fraction, PURPOSE), **names, "columns": np.array(features)}


def _scale(params: Params, x: Array, names: tuple[str, ...]) -> Normalise:
    """Return the conversion of rows to tensors; warn of columns that are not scaled."""
    mean, std = params.mean or (), params.std or ()
    if len(mean) != len(std) or 0.0 in std or (mean and params.standardise):
        cure = "give a mean and a std other than 0 for each feature, or set task.standardise=true"
        raise ConfigError(f"task.mean, task.std, task.standardise: {cure}.")
    if params.standardise:
        deviation = x.std(axis=0, dtype=np.float64)
        mean = tuple(float(m) for m in x.mean(axis=0, dtype=np.float64))
        std = tuple(float(s) if s > 0 else 1.0 for s in deviation)
        logger.info("table: task.mean=%s task.std=%s", list(mean), list(std))
    if not mean:
        if unscaled := [name for name, top in zip(names, np.abs(x).max(axis=0, initial=0)) if top > UNSCALED]:
            cure = "Set task.standardise=true, or task.mean and task.std."
            shown = ", ".join(unscaled[:5]) + (" ..." if len(unscaled) > 5 else "")
            logger.warning("fedcross: task=table: unscaled columns: %s. %s", shown, cure)
        return Normalise((0.0,), (1.0,), 1.0)
    if len(mean) != len(names):
        raise ConfigError(f"task.mean has {len(mean)} values, but there are {len(names)} features: {', '.join(names)}.")
    return Normalise(mean, std, 1.0)


def load(params: Params) -> Task:
    """Return the table's examples; raw inputs are float32 ``(n, features)``."""
    paths = params.paths
    arrays = cached("table", paths.values(), params.keys(), lambda _: _decode(params, paths))
    names = tuple(map(str, arrays["columns"]))
    prepare = _scale(params, arrays["x_train"], names)
    return finished("table", arrays, params, paths["train"], prepare=prepare, feature_names=names, alone=params.alone)
