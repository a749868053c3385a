"""A data set of the library ``datasets`` on disk: what its ``save_to_disk`` wrote, a ``Dataset`` or a ``DatasetDict``.

One column is the input: pictures, texts, or arrays of numbers; several columns of numbers together are feature vectors.
Of a ``DatasetDict`` the parts ``train`` and ``test`` are read; without ``test``, `test_fraction` of every class is held
out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.extras import needed
from fedcross.tasks.base import IntArray, Task
from fedcross.tasks.reading.cache import Array, Arrays, Store, cached
from fedcross.tasks.reading.params import ImageParams
from fedcross.tasks.reading.pictures import shaped
from fedcross.tasks.reading.supervised import examples, put_parts
from fedcross.tasks.reading.tables import column, features, labels, owners
from fedcross.tasks.reading.words import SPECIAL
from fedcross.tasks.text import put_texts, text_task


class Params(ImageParams):
    """Settings of a data set on disk.

    Attributes
    ----------
    root : Path
        The folder that ``save_to_disk`` wrote.
    inputs : tuple of str or None
        The column with the inputs, or several columns of numbers; None for all but the label and the owners.
    label : str
        Column with the label of each example.
    users : str or None
        Column with the owner of each example, for ``partition=natural``.
    size : int
        Pictures: pixels of a side; the shorter side is scaled, the middle cropped.
    channels : {1, 3}
        Pictures: grey or colour.
    length : int
        Texts: words that are read.
    vocabulary : int
        Texts: most token ids.
    test_fraction : float
        Share of every class that is held out if there is no part ``test``.
    """

    root: Path
    inputs: tuple[str, ...] | None = None
    label: str = "label"
    users: str | None = None
    size: int = Field(default=32, ge=1)
    channels: Literal[1, 3] = 3
    length: int = Field(default=25, ge=1)
    vocabulary: int = Field(default=10_000, ge=len(SPECIAL) + 1)
    test_fraction: float = Field(default=0.2, ge=0, lt=1)


def _open(root: Path) -> dict[str, Any]:
    """Return the parts ``train`` and, if there is one, ``test``."""
    datasets = needed("datasets", "data", f"task.root={root}")
    if not root.is_dir():
        raise DataError(f"{root.absolute()}: no such folder. Give the folder that save_to_disk wrote, as task.root.")
    try:
        found = datasets.load_from_disk(str(root))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root}: not a data set that save_to_disk wrote. Give such a folder as task.root.") from error
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in parts:
        raise DataError(f"{root}: it has the parts {', '.join(parts)}, but no train.")
    used = {part: parts[part] for part in ("train", "test") if part in parts}
    if empty := [part for part, rows in used.items() if not len(rows)]:
        raise DataError(f"{root}: no examples in the part {empty[0]}.")
    return used


def _inputs(rows: Any, params: Params, where: str) -> tuple[str, Any]:
    """Return what the inputs are (``pictures``, ``texts``, ``numbers``) and the inputs."""
    datasets = needed("datasets", "data", where)
    names = params.inputs or tuple(n for n in rows.column_names if n not in (params.label, params.users))
    table = rows.with_format("arrow")[:]
    for name in names:
        column(table, name, "task.inputs", where)
    kinds = [rows.features[name] for name in names]
    if len(names) == 1 and isinstance(kinds[0], datasets.Image):
        return "pictures", (picture for picture in rows[names[0]])
    if len(names) == 1 and isinstance(kinds[0], datasets.Value) and kinds[0].dtype in ("string", "large_string"):
        return "texts", list(rows[names[0]])
    if len(names) == 1 and not isinstance(kinds[0], datasets.Value):
        return "numbers", _stacked(rows, names[0], where)
    if not names:
        raise DataError(f"{where}: no column beside the label {params.label!r}. Inputs are needed.")
    return "numbers", features(table, names, where)


def _stacked(rows: Any, name: str, where: str) -> Array:
    """Return a column of lists or arrays of numbers as float32 ``(n, ...)`` with channels."""
    try:
        x = np.asarray(rows.with_format("numpy")[name][:], dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: column {name!r} holds no arrays of numbers of one shape. Resize them.") from error
    if x.ndim not in (2, 3, 4):
        raise DataError(f"{where}: column {name!r} has inputs of shape {x.shape[1:]}, expected 1 to 3 dimensions.")
    bad = ~np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if bad.any():
        raise DataError(f"{where}: column {name!r} has NaN or infinity, first in row {int(np.argmax(bad)) + 1}.")
    return x[:, None] if x.ndim == 3 else x


def _decode(params: Params, store: Store) -> None:
    read: dict[str, tuple[str, Any, IntArray]] = {}
    people: dict[str, list[Any]] = {}
    classes: tuple[str, ...] = ()
    for part, rows in _open(params.root).items():
        where = f"{params.root} ({part})"
        table = rows.with_format("arrow")[:]
        raw = column(table, params.label, "task.label", where).to_pylist()
        known = getattr(rows.features[params.label], "names", None)  # of a ClassLabel, whose cells are numbers
        raw = [known[number] for number in raw] if known else raw
        y, classes = labels(raw, classes or tuple(known or ()), where, params.label)
        kind, inputs = _inputs(rows, params, where)
        read[part] = kind, inputs, y
        people[part] = [] if params.users is None else column(table, params.users, "task.users", where).to_pylist()
    store.put("classes", np.array(classes))
    numbers, names = owners([who for part in people.values() for who in part])
    pieces = dict(zip(read, np.split(numbers, [len(people["train"])])))
    if names:
        store.put("users", np.array(names))
    if read["train"][0] == "texts":
        texts = {part: (y, x, pieces[part] if names else None) for part, (_, x, y) in read.items()}
        put_texts(texts, params.vocabulary, params.length, params.test_fraction, store)
        return
    parts: dict[str, Arrays] = {}
    for part, (kind, x, y) in read.items():
        whole = np.stack([shaped(one, params.size, params.channels) for one in x]) if kind == "pictures" else x
        parts[part] = {"x": whole, "y": y} | ({"u": pieces[part]} if names else {})
    put_parts(parts, params.test_fraction, "dataset test split", store)


def load(params: Params) -> Task:
    """Return the data set's examples; raw inputs are uint8 pictures, float32 arrays or int32 token ids.

    Raises
    ------
    DataError
        If the folder holds no data set, or a column is missing or holds what cannot be learned from.
    """
    if not params.root.is_dir():
        _open(params.root)  # raises the error
    sources = sorted(path for path in params.root.rglob("*") if path.is_file())
    keys = params.model_dump(
        include={"inputs", "label", "users", "size", "channels", "length", "vocabulary", "test_fraction"}
    )
    arrays = cached("dataset", sources, keys, lambda store: _decode(params, store))
    if "words" in arrays:
        return text_task("dataset", arrays, params, params.root)
    classes = tuple(str(one) for one in arrays["classes"])
    train, test = examples(arrays, len(classes), params.root, params)
    x = arrays["x_train"]
    return Task(
        name="dataset",
        train=train,
        test=test,
        classes=len(classes),
        shape=tuple(x.shape[1:]),
        prepare=params.normaliser(x.shape[1], 255.0 if x.dtype == np.uint8 else 1.0),
        augment=params.augmentation(),
        label_names=classes,
        user_names=tuple(str(one) for one in arrays.get("users", ())),
    )
