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
    """Settings of explicit indices.

    Attributes
    ----------
    file : Path
        The JSON file.
    """

    file: Path


def _clients(content: Any, file: Path) -> list[Any]:
    """Return the list of each client's indices; ids must be 0..N-1."""
    if isinstance(content, dict):
        missing = [str(client) for client in range(len(content)) if str(client) not in content]
        if missing:
            raise DataError(f"{file}: {len(content)} clients but no client {missing[0]!r}; ids must be 0, 1, 2, ...")
        return [content[str(client)] for client in range(len(content))]
    if not isinstance(content, list) or not content:
        raise DataError(f"{file}: expected a list of index lists or an object of them, not {type(content).__name__}.")
    return content


def _indices(clients: list[Any], n: int, which: str, file: Path) -> list[IntArray]:
    parts = []
    owner = np.full(n, -1, np.int64)
    for client, values in enumerate(clients):
        where = f"{file}: client {client}"
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise DataError(f"{where}: {which} indices must be a list of integers.")
        part = np.array(values, dtype=np.int64)
        outside = part[(part < 0) | (part >= n)]
        if len(outside):
            raise DataError(f"{where}: index {outside[0]} is not in 0..{n - 1}, the {which} set of this task.")
        taken = part[owner[part] >= 0]
        if len(taken):
            raise DataError(f"{where}: {which} example {taken[0]} already belongs to client {owner[taken[0]]}.")
        owner[part] = client
        if len(np.unique(part)) != len(part):
            raise DataError(f"{where}: a {which} index appears twice.")
        parts.append(part)
    return parts


def split(params: Params, task: Task, seed: int) -> Partition:  # noqa: ARG001  # the file decides, not the seed
    """Return the file's partition.

    Raises
    ------
    DataError
        If the file is missing or damaged, or a client's indices are out of range, doubled, shared or none; names the
        file and the client.
    """
    file = params.file
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"partition.file={str(file)!r}: no such file. Give the JSON of the clients' indices."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not readable as JSON ({error}).") from error
    test = None
    if isinstance(content, dict):
        key = next((key for key in ("train", "train_data") if key in content), None)
        if key is not None:
            test = content.get(key.replace("train", "test"))
            content = content[key]
    train = owned(_indices(_clients(content, file), len(task.train), "training", file), where=f"{file}: ")
    if test is None:
        return Partition(train=train)
    tests = _indices(_clients(test, file), len(task.test), "test", file)
    if len(tests) != len(train):
        raise DataError(f"{file}: {len(train)} clients in the training part but {len(tests)} in the test part.")
    return Partition(train=train, test=tests)
