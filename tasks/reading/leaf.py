"""LEAF's JSON: a folder of files, each with ``users``, ``num_samples`` and ``user_data[user] = {x, y}``.

Source: S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv 1812.01097, and its preprocessing scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.base import Examples
from fedcross.tasks.reading.cache import Array, Arrays, Store
from fedcross.tasks.reading.params import LimitParams, check_labels, checked, limited

PARTS = ("train", "test")


@dataclass(frozen=True)
class UserData:
    """One user's examples as the file holds them."""

    file: Path
    user: str
    x: Sequence[Any] | Array
    y: Sequence[Any] | Array

    @property
    def where(self) -> str:
        """The file and user, for messages."""
        return f"{self.file}: user {self.user!r}"


def find_files(folder: Path, name: str, help_text: str) -> dict[str, list[Path]]:
    """Return the JSON files of ``folder/train`` and ``folder/test``; raise DataError if either has none.

    Without a folder ``train`` the machine only evaluates (the server of a real federation), and ``train`` has no files.
    """
    files = {part: sorted((folder / part).glob("*.json")) for part in PARTS}
    for part, found in files.items():
        idle = part == "train" and files["test"] and not (folder / part).exists()
        if not found and not idle:
            raise DataError(f"{name}: no *.json in {(folder / part).absolute()}. {help_text}")
    return files


def read(path: Path) -> Iterator[UserData]:
    """Yield the users of one file in its order.

    Raises
    ------
    DataError
        If the file is not JSON, not LEAF's format, or inconsistent; names the file and, where known, the user.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise DataError(f"{path}: not readable as JSON ({error}). Copy or make the file again.") from error
    keys = ("users", "num_samples", "user_data")
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise DataError(f"{path}: not LEAF's format, which has {', '.join(keys)}.")
    users, counts, data = (content[key] for key in keys)
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)):
        raise DataError(f"{path}: not LEAF's format: users and num_samples are lists, user_data is an object.")
    if len(users) != len(counts):
        raise DataError(f"{path}: {len(users)} users but {len(counts)} entries in num_samples.")
    for user, count in zip(users, counts):
        yield _user(path, str(user), count, data)


def read_all(paths: Sequence[Path]) -> Iterator[UserData]:
    """Yield the users of several files, one file in memory at a time."""
    for path in paths:
        yield from read(path)


def _user(path: Path, user: str, count: Any, data: Mapping[str, Any]) -> UserData:
    own = data.get(user)
    if not isinstance(own, dict) or not isinstance(own.get("x"), list) or not isinstance(own.get("y"), list):
        raise DataError(f"{path}: user {user!r} has no lists x and y in user_data.")
    if not len(own["x"]) == len(own["y"]) == count:
        raise DataError(
            f"{path}: user {user!r} has {len(own['x'])} inputs and {len(own['y'])} labels, "
            f"but num_samples says {count}."
        )
    return UserData(path, user, own["x"], own["y"])


def labels(data: UserData, classes: int) -> Array:
    """Return the user's labels as int64; raise DataError naming file and user if one is no integer in range."""
    try:
        y = np.asarray(data.y)
    except ValueError as error:
        raise DataError(f"{data.where}: labels of different kinds ({error}).") from error
    if y.size and (y.ndim != 1 or y.dtype.kind not in "iu"):
        raise DataError(f"{data.where}: labels are {y.dtype}, expected one integer per example.")
    if y.size:
        check_labels(y, classes, data.where)
    return y.astype(np.int64)


def decode(
    parts: Mapping[str, Sequence[UserData] | Iterator[UserData]],
    encode: Callable[[UserData], tuple[Array, Array]],
    store: Store,
) -> None:
    """Store ``x_PART``, ``y_PART``, ``u_PART`` (user numbers) and ``names`` (sorted user names).

    User number i is the i-th name in sorted order over both parts, so that it does not depend on file order.
    """
    seen: dict[str, list[tuple[str, Array, Array]]] = {}
    for part, users in parts.items():
        seen[part] = [(data.user, *encode(data)) for data in users]
    names = sorted({user for rows in seen.values() for user, _, _ in rows})
    number = {user: i for i, user in enumerate(names)}
    for part, rows in seen.items():
        filled = [row for row in rows if len(row[2])]
        if not filled and not rows and part == "train":  # a machine that only evaluates
            filled = [(user, x[:0], y[:0]) for user, x, y in seen["test"][:1]]
        if not filled:
            raise DataError(f"the {part} files hold {len(rows)} users but no examples.")
        store.put(f"x_{part}", np.concatenate([x for _, x, _ in filled]))
        store.put(f"y_{part}", np.concatenate([y for _, _, y in filled]))
        store.put(f"u_{part}", np.concatenate([np.full(len(y), number[user], np.int64) for user, _, y in filled]))
    store.put("names", np.array(names))


def examples(arrays: Arrays, classes: int, where: Path, params: LimitParams) -> dict[str, Examples]:
    """Return ``train`` and ``test`` from what :func:`decode` stored, checked and limited."""
    limits = {"train": params.limit, "test": params.limit_test}
    found = {}
    for part in PARTS:
        x, y, users = (arrays[f"{key}_{part}"] for key in "xyu")
        found[part] = limited(checked(x, y, classes, where, users, empty=part == "train"), limits[part], part)
    return found


def no_download(download: bool, name: str, help_text: str) -> None:
    """Raise :class:`DataError` if a download is asked of a set that its publishers do not offer ready to use."""
    if download:
        raise DataError(f"task.download=true: {name} has no ready download. {help_text}")
