"""Your own arrays: one ``.npz`` with ``x`` and ``y`` and, if you have them, ``x_test``, ``y_test``, ``users``.

``x`` is one of: uint8 images ``(n, height, width)`` or ``(n, channels, height, width)``; float images or feature
vectors of the same shapes or ``(n, features)``; token ids ``(n, length)`` of integers with `vocabulary` set. ``y``
holds integers from 0. ``users`` names the owner of each row of ``x``. Without ``x_test``, `test_fraction` of every
class is held out. A file with ``x_test`` and ``y_test`` alone is for a machine that only evaluates: the server of a
real federation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.reading.cache import Array, Arrays, Store, cached
from fedcross.tasks.reading.npz import read_npz
from fedcross.tasks.reading.params import (
    ImageParams,
    check_labels,
    checked,
    limited,
    prepared,
    require,
    stratified,
    token_ids,
)


class Params(ImageParams):
    """Settings of an npz.

    Attributes
    ----------
    root : Path
        Folder of the file.
    file : str
        Its name.
    classes : int or None
        Number of labels; None for the largest label + 1. Give it wherever a device may lack the last class.
    shape : tuple of int or None
        Shape of one input, ``(channels, height, width)`` or ``(features,)``; None for whatever the file has. Give it
        wherever each machine has a file of its own: one that differs is refused.
    vocabulary : int
        Number of token ids if ``x`` is text, else 0.
    test_fraction : float
        Share of every class that is held out if there is no ``x_test``.
    """

    root: Path
    file: str = "data.npz"
    classes: int | None = Field(default=None, ge=1)
    shape: tuple[int, ...] | None = None
    vocabulary: int = Field(default=0, ge=0)
    test_fraction: float = Field(default=0.2, ge=0, lt=1)


def _inputs(x: Array, name: str, path: Path, vocabulary: int) -> Array:
    """Return `x` as uint8 or float32 inputs with channels, or int32 token ids."""
    if vocabulary:
        if x.ndim != 2 or x.dtype.kind not in "iu":
            raise DataError(
                f"{path}: {name} is {x.dtype} {x.shape}; with task.vocabulary it must be integers (n, length)."
            )
        if x.size and not (x.min() >= 0 and x.max() < vocabulary):
            raise DataError(f"{path}: {name} has ids from {x.min()} to {x.max()}, not in 0..{vocabulary - 1}.")
        return x.astype(np.int32)
    if x.ndim not in (2, 3, 4) or (x.dtype != np.uint8 and x.dtype.kind != "f"):
        raise DataError(
            f"{path}: {name} is {x.dtype} {x.shape}, expected uint8 or float of shape (n, features), "
            "(n, height, width) or (n, channels, height, width); for text set task.vocabulary."
        )
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        raise DataError(f"{path}: {name} has shape {x.shape}: channels come last. Save {name}.transpose(0, 3, 1, 2).")
    if x.dtype.kind == "f":
        x = x.astype(np.float32)
        bad = ~np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
        if bad.any():
            raise DataError(f"{path}: {name} has NaN or infinite values, first in example {int(np.argmax(bad))}.")
    return x[:, None] if x.ndim == 3 else x


def _labels(y: Array, name: str, path: Path) -> Array:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {y.dtype} {y.shape}, expected one integer per example.")
    return y.astype(np.int64)


def _read(path: Path) -> Arrays:
    """Return the file's arrays; one that has only a test set gets an empty training set of the same kind."""
    content = read_npz(path, (), ("x", "y", "x_test", "y_test", "users"))
    for pair in (("x", "y"), ("x_test", "y_test")):
        missing = [name for name in pair if name not in content]
        if len(missing) == 1:
            has = ", ".join(content)
            raise DataError(f"{path}: no {missing[0]} in it; it has {has}. {pair[0]} and {pair[1]} come together.")
    if "x" not in content:
        if "x_test" not in content:
            raise DataError(f"{path}: neither x and y nor x_test and y_test in it. Save them with numpy.savez.")
        content |= {"x": content["x_test"][:0], "y": content["y_test"][:0]}
        content.pop("users", None)
    return content


def _decode(path: Path, params: Params, store: Store) -> None:
    content = _read(path)
    x, y = _inputs(content["x"], "x", path, params.vocabulary), _labels(content["y"], "y", path)
    if len(y) or "x_test" not in content:
        check_labels(y, params.classes or int(y.max(initial=0)) + 1, path)
    users = content.get("users")
    if len(x) != len(y) or (users is not None and users.shape != (len(y),)):
        owners = "" if users is None else f", users {users.shape}"
        raise DataError(f"{path}: x has {len(x)} examples, y {len(y)}{owners}. They must be equal.")
    names, numbers = (None, None) if users is None else np.unique(users, return_inverse=True)
    parts: dict[str, Arrays] = {"train": {"x": x, "y": y}}
    if numbers is not None and names is not None:
        parts["train"]["u"] = numbers.astype(np.int64)
        store.put("names", names.astype(str))
    if "x_test" in content:
        x_test = _inputs(content["x_test"], "x_test", path, params.vocabulary)
        if x_test.shape[1:] != x.shape[1:]:
            raise DataError(f"{path}: x_test has inputs of shape {x_test.shape[1:]}, x of {x.shape[1:]}.")
        parts["test"] = {"x": x_test, "y": _labels(content["y_test"], "y_test", path)}
    else:
        kept, held = stratified(y, params.test_fraction, "arrays test split")
        parts = {
            part: {key: array[chosen] for key, array in parts["train"].items()}
            for part, chosen in (("train", kept), ("test", held))
        }
    for part, arrays in parts.items():
        for key, array in arrays.items():
            store.put(f"{key}_{part}", array)


def load(params: Params) -> Task:
    """Return the file's examples; raw inputs are uint8 or float32 ``(n, ...)``, or int32 token ids ``(n, length)``.

    Raises
    ------
    DataError
        If the file is missing, damaged, or holds values that cannot be learned from; the message names it.
    """
    path = params.root / params.file
    if path.suffix in (".csv", ".tsv", ".parquet"):
        raise DataError(f"{path}: task=arrays reads an .npz. For this file write task=table task.file={params.file}.")
    require([path], "arrays", "Save x and y with numpy.savez, or set task.root and task.file.")
    keys = params.model_dump(include={"classes", "vocabulary", "test_fraction"})
    arrays = cached("arrays", [path], keys, lambda store: _decode(path, params, store))
    x, y = arrays["x_train"], arrays["y_train"]
    classes = params.classes or int(max(y.max(initial=0), arrays["y_test"].max(initial=0))) + 1
    if params.shape is not None and tuple(x.shape[1:]) != params.shape:
        raise DataError(
            f"{path}: inputs of shape {tuple(x.shape[1:])}, this federation's are {params.shape} (task.shape). "
            "Save them in that shape."
        )
    train = checked(x, y, classes, path, arrays.get("u_train"), empty=len(arrays["y_test"]) > 0)
    test = checked(arrays["x_test"], arrays["y_test"], classes, path, arrays.get("u_test"), empty=True)
    scale = 255.0 if x.dtype == np.uint8 else 1.0
    return Task(
        name="arrays",
        train=limited(train, params.limit, "train"),
        test=limited(test, params.limit_test, "test"),
        classes=classes,
        shape=tuple(x.shape[1:]),
        prepare=token_ids if params.vocabulary else params.normaliser(x.shape[1], scale),
        augment=params.augmentation(),
        vocabulary=params.vocabulary,
        user_names=tuple(str(name) for name in arrays.get("names", ())),
    )


def outline(params: Params) -> Task | None:
    """Return the task without examples, for who has no file: what it says of inputs and labels stands in the settings.

    Only `prepare` may be unknown: uint8 and float inputs differ by the scale. None if shape or classes are not set, or
    if the file is there.
    """
    if params.classes is None or params.shape is None or (params.root / params.file).exists():
        return None
    raw = np.dtype(np.int32 if params.vocabulary else np.float32)
    none = Examples(np.empty((0, *params.shape), raw), np.empty(0, np.int64))
    return Task(
        name="arrays",
        train=none,
        test=none,
        classes=params.classes,
        shape=params.shape,
        prepare=token_ids if params.vocabulary else prepared,
        vocabulary=params.vocabulary,
    )
