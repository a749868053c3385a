"""Your own texts: lines ``label<TAB>text`` in a ``.txt`` file, or two columns of a CSV, TSV or Parquet file.

Words are numbered by how often the training texts have them. Without `test_file`, `test_fraction` of every class is
held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.base import IntArray, Task
from fedcross.tasks.reading.cache import Store, cached
from fedcross.tasks.reading.params import LimitParams, stratified, token_ids
from fedcross.tasks.reading.supervised import examples, put_parts
from fedcross.tasks.reading.tables import column, labels, missing, owners, read_table
from fedcross.tasks.reading.words import SPECIAL, split_words, vocabulary, word_ids


class Params(LimitParams):
    """Settings of texts.

    Attributes
    ----------
    root : Path
        Folder of the file.
    file : str
        Its name. ``.txt``: lines ``label<TAB>text``; ``.csv``, ``.tsv``, ``.parquet``: a table.
    test_file : str or None
        A second file of the same kind with the test texts; None to hold out `test_fraction`.
    text, label : str
        Columns of a table with the text and its label.
    users : str or None
        Column of a table with the owner of each text, for ``partition=natural``.
    classes : tuple
        All labels in the order of their numbers; empty for the sorted ones of the file.
    length : int
        Words of a text that are read; the rest is cut, shorter ones are padded on the left.
    vocabulary : int
        Most token ids, with those for padding and unknown words.
    test_fraction : float
        Share of every class that is held out if there is no `test_file`.
    """

    root: Path
    file: str = "data.txt"
    test_file: str | None = None
    text: str = "text"
    label: str = "label"
    users: str | None = None
    classes: tuple[str | int, ...] = ()
    length: int = Field(default=25, ge=1)
    vocabulary: int = Field(default=10_000, ge=len(SPECIAL) + 1)
    test_fraction: float = Field(default=0.2, ge=0, lt=1)


def read_lines(path: Path) -> tuple[list[str], list[str]]:
    """Return the labels and the texts of the lines ``label<TAB>text``; empty lines are passed over.

    Raises
    ------
    DataError
        If the file is missing, empty, not UTF-8, or a line has no label; names the line.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(missing(path)) from error
    except UnicodeDecodeError as error:
        line = 1 + path.read_bytes()[: error.start].count(b"\n")
        raise DataError(f"{path}: line {line} is not UTF-8. Save the file as UTF-8.") from error
    found: tuple[list[str], list[str]] = [], []
    for number, row in enumerate(content.split("\n"), start=1):
        label, tab, text = row.rstrip("\r").partition("\t")
        if not row.strip():
            continue
        if not tab or not label.strip():
            raise DataError(f"{path}: line {number} has no label. Write it as label, tab, text.")
        found[0].append(label.strip())
        found[1].append(text)
    if not found[0]:
        raise DataError(f"{path}: no texts in it. Write a line for each: label, tab, text.")
    return found


def _columns(path: Path, params: Params) -> tuple[list[Any], list[str], list[Any]]:
    """Return labels, texts and owners of a file."""
    if path.suffix.lower() == ".txt":
        if params.users is not None:
            raise DataError(f"{path}: task.users needs a table with such a column: .csv, .tsv or .parquet.")
        return *read_lines(path), []
    table = read_table(path)
    texts = column(table, params.text, "task.text", path).to_pylist()
    if wrong := [text for text in texts if not isinstance(text, str)][:1]:
        raise DataError(f"{path}: column {params.text!r} holds {wrong[0]!r}, no text. Name another with task.text.")
    people = [] if params.users is None else column(table, params.users, "task.users", path).to_pylist()
    return column(table, params.label, "task.label", path).to_pylist(), texts, people


def put_texts(
    labelled: dict[str, tuple[IntArray, list[str], IntArray | None]],
    size: int,
    length: int,
    fraction: float,
    store: Store,
) -> None:
    """Store the parts of texts as token ids; the vocabulary comes from the texts to train on alone.

    Parameters
    ----------
    labelled : dict
        ``train`` (and ``test``): numbers of the labels, texts, and numbers of the owners if there are any.
    size, length : int
        Most token ids; words of a text that are read.
    fraction : float
        Share of every class that is held out if there is no ``test``.
    store : Store
        Gets ``x``, ``y`` and ``u`` of both parts, and ``words``.
    """
    y, texts, _ = labelled["train"]
    kept = range(len(y)) if "test" in labelled else stratified(y, fraction, PURPOSE)[0].tolist()
    words = vocabulary((split_words(texts[row]) for row in kept), size)
    store.put("words", np.array(words))
    parts = {}
    for part, (numbers, texts, people) in labelled.items():
        parts[part] = {"x": word_ids([split_words(text) for text in texts], words, length), "y": numbers}
        if people is not None:
            parts[part]["u"] = people
    put_parts(parts, fraction, PURPOSE, store)


PURPOSE = "text test split"


def _decode(params: Params, store: Store) -> None:
    classes = params.classes
    read: dict[str, tuple[IntArray, list[str], list[Any]]] = {}
    for part, file in (("train", params.file), ("test", params.test_file)):
        if file is not None:
            raw, texts, people = _columns(params.root / file, params)
            y, classes = labels(raw, classes, params.root / file, params.label)
            read[part] = y, texts, people
    numbers, names = owners([who for _, _, people in read.values() for who in people])
    pieces = dict(zip(read, np.split(numbers, [len(read["train"][0])])))
    store.put("classes", np.array([str(one) for one in classes]))
    if names:
        store.put("users", np.array(names))
    labelled = {part: (y, texts, pieces[part] if names else None) for part, (y, texts, _) in read.items()}
    put_texts(labelled, params.vocabulary, params.length, params.test_fraction, store)


def load(params: Params) -> Task:
    """Return the texts; raw inputs are int32 token ids ``(n, length)``.

    Raises
    ------
    DataError
        If the file is missing or damaged, or a line or column is wrong; the message names it.
    """
    paths = [params.root / file for file in (params.file, params.test_file) if file is not None]
    for path in paths:
        if not path.is_file():
            _columns(path, params)  # raises the error
    keys = params.model_dump(exclude={"root", "limit", "limit_test"})
    arrays = cached("text", paths, keys, lambda store: _decode(params, store))
    return text_task("text", arrays, params, paths[0])


def text_task(name: str, arrays: dict[str, Any], params: Any, where: Path) -> Task:
    """Return the task `name` from what :func:`put_texts` stored."""
    classes: Sequence[str] = tuple(str(one) for one in arrays["classes"])
    train, test = examples(arrays, len(classes), where, params)
    return Task(
        name=name,
        train=train,
        test=test,
        classes=len(classes),
        shape=(params.length,),
        prepare=token_ids,
        vocabulary=len(arrays["words"]),
        label_names=classes,
        user_names=tuple(str(one) for one in arrays.get("users", ())),
        alone=False,  # the vocabulary comes from everybody's texts
    )
