"""Your own texts: lines ``label<TAB>text`` in a ``.txt`` file, or two columns of a CSV, TSV or Parquet file.

Words are numbered by how often the training texts have them. Without `test_file`, `test_fraction` of every class is
held out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import DataError
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Arrays, cached
from fedcross.tasks.reading.params import finished, read_lines
from fedcross.tasks.reading.tables import TableParams, column, labelled, read_table
from fedcross.tasks.reading.words import WordParams, text_arrays

if TYPE_CHECKING:
    from pandas import DataFrame


class Params(TableParams, WordParams):
    """Settings of texts.

    Attributes
    ----------
    text : str
        Column of a table with the text.
    """

    file: str = "data.txt"
    text: str = "text"


def _table(path: Path, params: Params) -> DataFrame:
    """Return a table, or the lines ``label<TAB>text`` as one; empty lines are passed over."""
    import pandas as pd

    if path.suffix.lower() != ".txt":
        return read_table(path)
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        label, tab, text = line.partition("\t")
        if line.strip() and not (tab and label.strip()):
            raise DataError(f"{path}: line {number} has no label. Write it as label, tab, text.")
        if line.strip():
            rows.append((label.strip(), text))
    if not rows or params.users is not None:
        raise DataError(f"{path}: write a line for each text: label, tab, text. Owners (task.users) need a table.")
    return pd.DataFrame(rows, columns=[params.label, params.text])


def _decode(params: Params, paths: dict[str, Path]) -> Arrays:
    tables = {part: _table(path, params) for part, path in paths.items()}
    texts = {part: column(table, params.text, "task.text", paths[part]).tolist() for part, table in tables.items()}
    for part, found in texts.items():
        if wrong := [text for text in found if not isinstance(text, str)][:1]:
            shown = f"column {params.text!r} holds {wrong[0]!r}, no text"
            raise DataError(f"{paths[part]}: {shown}. Name another with task.text.")
    parts, names = labelled(tables, params, params.classes, paths["train"])
    return {**text_arrays(parts, texts, params, params.test_fraction), **names}


def load(params: Params) -> Task:
    """Return the texts; raw inputs are int32 token ids ``(n, length)``."""
    paths = params.paths
    arrays = cached("text", paths.values(), params.keys(), lambda _: _decode(params, paths))
    return finished("text", arrays, params, paths["train"])
