"""LEAF's JSON: a folder of files, each with ``users``, ``num_samples`` and ``user_data[user] = {x, y}``.

Source: S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv 1812.01097.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.reading.cache import Array, Arrays
from fedcross.tasks.reading.params import PARTS, FileParams, published


class UserData(NamedTuple):
    """One user's examples as the file holds them; `where` names file and user for messages."""

    where: str
    user: str
    x: Sequence[Any] | Array
    y: Sequence[Any] | Array


#: The users of each part.
Parts = Mapping[str, Iterable[UserData]]


def find_files(folder: Path, name: str, params: FileParams, cure: str) -> dict[str, list[Path]]:
    """Return the JSON files of ``folder/train`` and ``folder/test``; raise DataError if either has none.

    Without a folder ``train`` the machine only evaluates (the server of a real federation), and ``train`` has no files.
    """
    files = {part: sorted((folder / part).glob("*.json")) for part in PARTS}
    for part, found in files.items():
        only_tests = part == "train" and files["test"] and not (folder / part).exists()
        published(name, found or ([] if only_tests else [folder / part / "*.json"]), params, cure)
    return files


def read(paths: Iterable[Path]) -> Iterator[UserData]:
    """Yield the users of several files, one file in memory at a time."""
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            pairs = list(zip(content["users"], content["num_samples"], strict=True))
            data = content["user_data"]
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not LEAF's JSON ({error!r}). Copy or make the file again.") from error
        for user, count in pairs:
            own, where = data.get(user, {}), f"{path}: user {user!r}"
            x, y = own.get("x"), own.get("y")
            if not isinstance(x, list) or not isinstance(y, list) or not len(x) == len(y) == count:
                raise DataError(f"{where} has no lists x and y of {count} examples, as num_samples says.")
            yield UserData(where, str(user), x, y)


def labels(data: UserData, classes: int) -> Array:
    """Return the user's labels as int64; raise DataError naming file and user if one is no integer in range."""
    for label in data.y:
        if not isinstance(label, int | np.integer) or not 0 <= label < classes:
            raise DataError(f"{data.where}: label {label!r} is no integer in 0..{classes - 1}.")
    return np.array(data.y, np.int64)


def decode(parts: Parts, encode: Callable[[UserData], tuple[Array, Array]]) -> Arrays:
    """Return ``x_PART``, ``y_PART``, ``u_PART`` (user numbers) and ``names`` (sorted user names).

    User number i is the i-th name in sorted order over both parts, so that it does not depend on file order.
    """
    seen = {part: [(data.user, *encode(data)) for data in users] for part, users in parts.items()}
    names = sorted({user for rows in seen.values() for user, _, _ in rows})
    number = {user: i for i, user in enumerate(names)}
    arrays: Arrays = {"names": np.array(names)}
    for part, rows in seen.items():
        filled = [row for row in rows if len(row[2])]
        if not rows and part == "train":  # a machine that only evaluates
            filled = [(user, x[:0], y[:0]) for user, x, y in seen["test"][:1]]
        if not filled:
            raise DataError(f"the {part} files hold {len(rows)} users but no examples.")
        pieces = zip(*((x, y, np.full(len(y), number[user], np.int64)) for user, x, y in filled))
        arrays |= {f"{key}_{part}": np.concatenate(one) for key, one in zip("xyu", pieces, strict=True)}
    return arrays
