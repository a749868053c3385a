"""Explicit indices in a JSON file, for partitions that somebody published.

The file holds a list of index lists, or an object ``{"0": [...], "1": [...], ...}``; either may stand under ``train``
(with ``test`` beside it) or, as in the FedCross authors' files (repository FedMut), under ``train_data``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.core.errors import DataError
from fedcross.core.settings import Settings
from fedcross.tasks.base import IntArray, Partition, Task
from fedcross.tasks.partition._common import owned


class Params(Settings):
    """Settings of explicit indices: the JSON file."""

    file: Path


def _indices(content: Any, n: int, which: str, file: Path) -> list[IntArray]:
    """Return each client's indices into the `which` set of `n` examples; no example has two owners."""
    if isinstance(content, dict):
        if missing := [str(client) for client in range(len(content)) if str(client) not in content]:
            raise DataError(f"{file}: {len(content)} clients but no client {missing[0]!r}; ids must be 0, 1, 2, ...")
        content = [content[str(client)] for client in range(len(content))]
    if not isinstance(content, list) or not content:
        raise DataError(f"{file}: expected a list of index lists or an object of them, not {type(content).__name__}.")
    owner = dict[int, int]()
    for client, values in enumerate(content):
        where = f"{file}: client {client}"
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value < n for value in values):
            raise DataError(f"{where}: {which} indices must be a list of integers in 0..{n - 1}.")
        for value in values:
            if value in owner:
                raise DataError(f"{where}: {which} example {value} already belongs to client {owner[value]}.")
            owner[value] = client
    return [np.array(values, dtype=np.int64) for values in content]


def split(params: Params, task: Task, seed: int) -> Partition:  # noqa: ARG001  # the file decides, not the seed
    """Return the file's partition; a DataError if it is damaged, or indices are out of range, doubled or shared."""
    file, test = params.file, None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"partition.file={str(file)!r}: not readable as JSON of clients' indices ({error}).") from error
    for name in ("train", "train_data"):
        if isinstance(content, dict) and name in content:
            content, test = content[name], content.get(name.replace("train", "test"))
    train = owned(_indices(content, len(task.train), "training", file), where=f"{file}: ")
    tests = None if test is None else _indices(test, len(task.test), "test", file)
    if tests is not None and len(tests) != len(train):
        raise DataError(f"{file}: {len(train)} clients in the training part but {len(tests)} in the test part.")
    return Partition(train=train, test=tests)
