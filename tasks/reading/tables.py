"""Tables on disk (CSV, TSV, Parquet) and their columns: features, labels, owners.

A table is a :class:`pyarrow.Table`; pyarrow comes with the extra ``data`` and is imported at the first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.core.errors import DataError, nearest
from fedcross.core.extras import needed
from fedcross.tasks.base import IntArray
from fedcross.tasks.reading.cache import Array

#: Endings of files that pyarrow reads as text with separators, and what separates their columns.
SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")


def missing(path: Path) -> str:
    """Return the error for a file of the user's that is not at `path`."""
    here = " It lies in the folder where you are: task.root=." if Path(path.name).is_file() else ""
    return f"{path.absolute()}: no such file. Set task.root to its folder and task.file to its name.{here}"


def read_table(path: Path, separator: str | None = None) -> Any:
    """Return the table in `path`, a :class:`pyarrow.Table` with at least one row and unique column names.

    Raises
    ------
    DataError
        If the file is missing, empty, damaged, not UTF-8, or of a kind that is not known; names the file.
    """
    kind = path.suffix.lower()
    if kind not in (*SEPARATORS, *PARQUET):
        raise DataError(f"{path}: not a kind of table that is known. Use {', '.join((*SEPARATORS, *PARQUET))}.")
    if not path.is_file():
        raise DataError(missing(path))
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty. Give it a line of column names and a line for each example.")
    needed("pyarrow", "data", str(path))
    table = _parquet(path) if kind in PARQUET else _text(path, separator or SEPARATORS[kind])
    names = table.column_names
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are called {doubled[0]!r}. Rename one.")
    if not table.num_rows:
        raise DataError(f"{path}: no examples in it, only column names.")
    return table


def _parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({_first_line(error)}). Write it again.") from error


def _text(path: Path, separator: str) -> Any:
    import pyarrow
    import pyarrow.csv

    try:
        table = pyarrow.csv.read_csv(path, parse_options=pyarrow.csv.ParseOptions(delimiter=separator))
        names = list(table.column_names)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the column names are not UTF-8. Save the file as UTF-8.") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a table with {separator!r} between its columns ({_first_line(error)}). Mend that line, or "
            "set task.separator."
        ) from error
    for place, name in enumerate(names):
        if pyarrow.types.is_binary(table.column(place).type):
            row = next(i for i, cell in enumerate(table.column(place).to_pylist()) if not _is_utf8(cell))
            raise DataError(f"{path}: column {name!r} is not UTF-8, first in row {row + 1}. Save the file as UTF-8.")
    return table


def _is_utf8(cell: bytes | None) -> bool:
    try:
        (cell or b"").decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120].rstrip(".")


def column(table: Any, name: str, setting: str, where: Path | str) -> Any:
    """Return column `name`; an error says which ones there are.

    Raises
    ------
    DataError
        If the table has no such column or a cell of it is empty.
    """
    if name not in table.column_names:
        raise DataError(
            f"{where}: no column {name!r} ({setting}). {nearest(name, table.column_names)}{_one_column(table)}"
        )
    found = table.column(name)
    if found.null_count:
        row = next(i for i, cell in enumerate(found.to_pylist()) if cell is None)
        raise DataError(
            f"{where}: column {name!r} has {found.null_count} empty cells, first in row {row + 1}. Fill them or take "
            "these rows out."
        )
    return found


def _one_column(table: Any) -> str:
    return " Is task.separator right?" if table.num_columns == 1 else ""


def features(table: Any, names: Sequence[str], where: Path | str) -> Array:
    """Return the columns `names` as float32 ``(n, len(names))``.

    Raises
    ------
    DataError
        If a column is missing, holds text, dates or lists, or has an empty cell, NaN or infinity; names column and row.
    """
    import pyarrow

    out = np.empty((table.num_rows, len(names)), np.float32)
    for place, name in enumerate(names):
        cells = column(table, name, "task.columns", where)
        kind = cells.type
        numeric = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)
        if not numeric:
            raise DataError(f"{where}: column {name!r} holds {_seen(cells)}, a feature must be numbers. {CHOOSE}")
        with np.errstate(over="ignore"):  # a number too large for float32 is told below
            out[:, place] = cells.to_numpy().astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(out[:, place]))
        if len(bad):
            value = cells[int(bad[0])].as_py()
            raise DataError(
                f"{where}: column {name!r} has {len(bad)} values that are no finite numbers, first {value} in row "
                f"{bad[0] + 1}. Mend them or take these rows out."
            )
    return out


CHOOSE = "Turn it into numbers, or name the columns to use: task.columns=[a,b]."


def _seen(cells: Any) -> str:
    """Return what a column without numbers holds, with the first cell that shows it."""
    import pyarrow

    kind = cells.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return f"values of type {kind}"
    values = cells.to_pylist()
    row = next((i for i, value in enumerate(values) if not _is_number(value)), 0)
    mixed = "text among numbers" if any(_is_number(value) for value in values) else "text"
    return f"{mixed} ({values[row]!r} in row {row + 1})"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def labels(
    values: Sequence[Any], classes: Sequence[str | int], where: Path | str, name: str
) -> tuple[IntArray, tuple[str, ...]]:
    """Return the labels as int64 numbers from 0, and the names of the classes in the order of these numbers.

    Parameters
    ----------
    values : sequence
        One integer, string or bool per example.
    classes : sequence
        All classes in the order of their numbers; empty for the sorted values.
    where, name : str
        File and column, for messages.

    Raises
    ------
    DataError
        If a value is of another kind, is not among `classes`, or there is only one class.
    """
    kinds = {bool if isinstance(v, bool) else int if isinstance(v, int) else type(v) for v in values}
    if wrong := [v for v in values if not isinstance(v, (int, str))][:1]:
        raise DataError(
            f"{where}: the label column {name!r} holds {wrong[0]!r}, a label must be an integer or text. Name another "
            "column with task.label."
        )
    if len(kinds) > 1:
        raise DataError(f"{where}: the label column {name!r} holds text among integers. Use one of them.")
    known = tuple(str(one) for one in classes) or tuple(str(value) for value in sorted(set(values)))
    if len(known) < 2:
        raise DataError(f"{where}: all labels in {name!r} are {known[0]!r}. At least two classes are needed.")
    number = {one: place for place, one in enumerate(known)}
    for row, value in enumerate(values):
        if str(value) not in number:
            raise DataError(
                f"{where}: label {str(value)!r} in row {row + 1} is not one of the classes. "
                f"{nearest(str(value), known)}"
            )
    return np.array([number[str(value)] for value in values], dtype=np.int64), known


def owners(values: Sequence[Any]) -> tuple[IntArray, tuple[str, ...]]:
    """Return each row's owner as a number from 0, and the owners' names, sorted."""
    names, numbers = np.unique(np.array([str(value) for value in values]), return_inverse=True)
    return numbers.astype(np.int64), tuple(str(name) for name in names)
