"""Tables on disk (CSV, TSV, Parquet) and their columns: features, labels, owners; read by pandas."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcross.core.errors import DataError, nearest
from fedcross.tasks.reading.cache import Array, Arrays
from fedcross.tasks.reading.params import OwnParams

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Endings of text files, and what separates their columns.
SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
#: Ways to fill empty cells; anything else is the value itself.
FILLS = ("mean", "median", "most_frequent")


class LabelParams(OwnParams):
    """Settings of examples with columns.

    Attributes
    ----------
    label : str
        Column with the label of each example: integers or text.
    users : str or None
        Column with the owner of each example (a site), for ``partition=natural``.
    """

    label: str = "label"
    users: str | None = None


class TableParams(LabelParams):
    """Settings of a table.

    Attributes
    ----------
    file, test_file : str
        Name of the file, and of a second one with the test examples; None to hold out `test_fraction` of every class.
    classes : tuple
        All labels in the order of their numbers; empty for the sorted ones. Give it where a device may lack a class.
    """

    file: str
    test_file: str | None = None
    classes: tuple[str | int, ...] = ()

    @property
    def paths(self) -> dict[str, Path]:
        """The file of each part; a DataError says where one that is not there should be."""
        names = {"train": self.file, "test": self.test_file}
        paths = {part: self.root / name for part, name in names.items() if name is not None}
        for path in paths.values():
            if not path.is_file():
                here = " It lies in the folder where you are: task.root=." if Path(path.name).is_file() else ""
                cure = "Set task.root to its folder and task.file to its name."
                raise DataError(f"{path.absolute()}: no such file. {cure}{here}")
        return paths


def read_table(path: Path, separator: str | None = None) -> DataFrame:
    """Return the table in `path`, with at least one row."""
    import pandas as pd

    kind = path.suffix.lower()
    if kind not in (*SEPARATORS, *PARQUET):
        raise DataError(f"{path}: not a kind of table that is known. Use {', '.join((*SEPARATORS, *PARQUET))}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row longer than the header
            sep = separator or SEPARATORS.get(kind)
            table = pd.read_parquet(path) if kind in PARQUET else pd.read_csv(path, sep=sep, index_col=False)
    except (ValueError, OSError, ImportError, pd.errors.ParserWarning) as error:  # pandas' errors are ValueErrors
        reason = str(error).splitlines()[0][:150]
        raise DataError(f"{path}: no table can be read ({reason}). Correct the file.") from error
    table.columns = table.columns.map(str)
    if table.empty:
        raise DataError(f"{path}: no examples in it, only column names.")
    return table


def column(table: DataFrame, name: str, setting: str, where: Path | str) -> Series:
    """Return column `name` without empty cells; a DataError says which columns there are, or where a cell is empty."""
    if name not in table.columns:
        only = " Is task.separator right?" if len(table.columns) == 1 else ""
        raise DataError(f"{where}: no column {name!r} ({setting}). {nearest(name, list(table.columns))}{only}")
    found = table[name]
    if len(empty := np.flatnonzero(found.isna())):
        fill = " Or set task.fill=median." if setting == "task.columns" else ""
        places = f"{len(empty)} empty cells, first in row {empty[0] + 1}"
        raise DataError(f"{where}: column {name!r} has {places}. Fill them.{fill}")
    return found


def filled(table: DataFrame, names: Sequence[str], reference: DataFrame, fill: str | None) -> DataFrame:
    """Return the columns `names` with empty cells filled by what `reference`, the rows to train on, says.

    With ``mean`` and ``median`` text columns get their most frequent value; without `fill` cells stay empty.
    """
    from pandas.api.types import is_numeric_dtype

    out = table.copy()
    for name in names if fill is not None else ():
        if name not in out.columns or name not in reference or not out[name].isna().any():
            continue
        known, numeric = reference[name].dropna(), is_numeric_dtype(out[name])
        value: Any = fill
        try:
            if fill in ("mean", "median") and numeric and len(known):
                value = getattr(known.astype(float), fill)()
            elif fill in FILLS:
                value = known.mode().iloc[0]
            elif numeric:
                value = float(fill or "")
        except (ValueError, IndexError) as error:  # no number, or no cell that is not empty
            choices = f"Use {', '.join(FILLS)} or a value of its kind, or take it out of task.columns."
            raise DataError(f"task.fill={fill}: column {name!r} cannot be filled with it. {choices}") from error
        out[name] = out[name].fillna(value)
    return out


def coded(
    table: DataFrame, names: Sequence[str], categories: Mapping[str, Sequence[str]], where: Path | str
) -> tuple[Array, tuple[str, ...]]:
    """Return the columns `names` as float32 ``(n, features)``, and the features' names.

    A column in `categories` becomes one feature of zeros and ones for each of its values, ``column=value``.
    """
    features: dict[str, Array] = {}
    for name in names:
        cells = column(table, name, "task.columns", where)
        if name not in categories:
            features[name] = _numbers(cells, name, where)
            continue
        texts = cells.map(text_of)
        if unknown := sorted(set(texts) - set(categories[name])):
            known = ", ".join(categories[name])
            said = f"{where}: column {name!r} holds {unknown[0]!r}, which is none of its values {known}."
            raise DataError(f"{said} Add it to task.encode.")
        features |= {f"{name}={value}": (texts == value).to_numpy(np.float32) for value in categories[name]}
    return np.stack(list(features.values()), axis=1), tuple(features)


def text_of(value: Any) -> str:
    """Return a cell as text; whole numbers without a fraction."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def categories_of(table: DataFrame, names: Sequence[str], where: Path | str) -> dict[str, list[str]]:
    """Return the sorted values of the text columns `names`."""
    return {n: sorted({text_of(value) for value in column(table, n, "task.encode", where)}) for n in names}


def _numbers(cells: Series, name: str, where: Path | str) -> Array:
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(cells):
        texts = cells[pd.to_numeric(cells, errors="coerce").isna()]
        cure = f"Code it: task.encode=[{name}], or name the columns to use: task.columns=[a,b]."
        shown = [*texts, *cells][0]
        raise DataError(f"{where}: column {name!r} holds text ({shown!r}), a feature must be numbers. {cure}")
    with np.errstate(over="ignore"):
        out: Array = cells.to_numpy(np.float64).astype(np.float32)
    if len(bad := np.flatnonzero(~np.isfinite(out))):
        first = f"{len(bad)} values that are no finite numbers, first {cells.iloc[bad[0]]} in row {bad[0] + 1}"
        raise DataError(f"{where}: column {name!r} has {first}. Correct them or take these rows out.")
    return out


def labelled(
    tables: Mapping[str, DataFrame], params: LabelParams, classes: Sequence[str | int], where: Path
) -> tuple[dict[str, Arrays], Arrays]:
    """Return ``y`` (and ``u``) of each part, and the arrays ``classes`` and, with owners, ``names``.

    Labels are numbered in the order of `classes`, else of the sorted values of the part ``train``.
    """
    values = {part: column(table, params.label, "task.label", where).tolist() for part, table in tables.items()}
    kinds = {type(value) for found in values.values() for value in found}
    if kinds not in ({int}, {str}, {bool}):
        shown = f"{', '.join(sorted(kind.__name__ for kind in kinds))}, such as {values['train'][0]!r}"
        cure = "labels must be all integers or all text. Name another column with task.label."
        raise DataError(f"{where}: the label column {params.label!r} holds {shown}: {cure}")
    known = [str(one) for one in classes or sorted(set(values["train"]))]
    if len(known) < 2:
        raise DataError(f"{where}: all labels in {params.label!r} are {known[0]!r}. At least two classes are needed.")
    number = {one: place for place, one in enumerate(known)}
    for row, value in ((row, value) for found in values.values() for row, value in enumerate(found, start=1)):
        if str(value) not in number:
            near = nearest(str(value), known)
            raise DataError(f"{where}: label {str(value)!r} in row {row} is not one of the classes. {near}")
    parts: dict[str, Arrays] = {
        part: {"y": np.array([number[str(value)] for value in found], dtype=np.int64)} for part, found in values.items()
    }
    if params.users is None:
        return parts, {"classes": np.array(known)}
    people = [column(table, params.users, "task.users", where).map(str).to_numpy(str) for table in tables.values()]
    names, numbers = np.unique(np.concatenate(people), return_inverse=True)
    for part, piece in zip(parts, np.split(numbers.astype(np.int64), [len(people[0])])):
        parts[part]["u"] = piece
    return parts, {"classes": np.array(known), "names": names}
