"""Your own arrays: one ``.npz`` with ``x`` and ``y`` and, if you have them, ``x_test``, ``y_test``, ``users``.

``x`` is one of: uint8 images ``(n, height, width)`` or ``(n, channels, height, width)``; float images or feature
vectors of the same shapes or ``(n, features)``; token ids ``(n, length)`` of integers with `vocabulary` set. ``y``
holds integers from 0. ``users`` names the owner of each row of ``x``. Without ``x_test``, `test_fraction` of every
class is held out. A file with ``x_test`` and ``y_test`` alone is for a machine that only evaluates.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.reading.cache import Array, Arrays, cached
from fedcross.tasks.reading.params import ImageParams, OwnParams, finished, read_npz, split_parts, token_ids


class Params(OwnParams, ImageParams):
    """Settings of an npz.

    Attributes
    ----------
    file : str
        Its name.
    classes : int or None
        Number of labels; None for the largest label + 1. Give it where a device may lack the last class.
    shape : tuple of int or None
        Shape of one input; None for whatever the file has. Give it where each machine has a file of its own.
    vocabulary : int
        Number of token ids if ``x`` is text, else 0.
    """

    file: str = "data.npz"
    classes: int | None = Field(default=None, ge=1)
    shape: tuple[int, ...] | None = None
    vocabulary: int = Field(default=0, ge=0)


def _part(content: Arrays, suffix: str, params: Params, path: Path) -> Arrays:
    """Return ``x`` (uint8 or float32 with channels, or int32 token ids) and ``y`` of a part, checked."""
    x, y = (content.get(name + suffix, np.empty(0)) for name in "xy")
    found = f"{path}: x{suffix} is {x.dtype} {x.shape}, y{suffix} is {y.dtype} {y.shape}"
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(x) != len(y) or not len(y):
        raise DataError(f"{found}; expected one integer of y{suffix} for each example of x{suffix}.")
    if params.vocabulary:
        if x.ndim != 2 or x.dtype.kind not in "iu" or not (x.min() >= 0 and x.max() < params.vocabulary):
            raise DataError(f"{found}; expected token ids (n, length) in 0..{params.vocabulary - 1} (task.vocabulary).")
        return {"x": x.astype(np.int32), "y": y.astype(np.int64)}
    last = x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)  # a common mistake: channels come last
    if x.ndim not in (2, 3, 4) or (x.dtype != np.uint8 and x.dtype.kind != "f") or last:
        shapes = "(n, features), (n, height, width) or (n, channels, height, width)"
        raise DataError(f"{found}; expected uint8 or float of shape {shapes}; for text set task.vocabulary.")
    if not np.isfinite(x).all():
        raise DataError(f"{path}: x{suffix} has NaN or infinite values.")
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    return {"x": x[:, None] if x.ndim == 3 else x, "y": y.astype(np.int64)}


def _decode(path: Path, params: Params) -> Arrays:
    content = read_npz(path)
    parts: dict[str, Arrays] = {}
    if "x" in content or "x_test" not in content:
        parts["train"] = _part(content, "", params, path)
    if "x_test" in content or "y_test" in content:
        parts["test"] = _part(content, "_test", params, path)
        parts.setdefault("train", {key: array[:0] for key, array in parts["test"].items()})  # it only evaluates
    shapes = {part: arrays["x"].shape[1:] for part, arrays in parts.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{path}: x_test has inputs of shape {shapes['test']}, x of {shapes['train']}.")
    named: Arrays = {}
    if "users" in content and "x" in content:
        names, numbers = np.unique(content["users"], return_inverse=True)
        if content["users"].shape != parts["train"]["y"].shape:
            raise DataError(f"{path}: users has shape {content['users'].shape}. It must have one name for each y.")
        parts["train"]["u"], named["names"] = numbers.astype(np.int64), names.astype(str)
    return {**split_parts(parts, params.test_fraction, "arrays test split"), **named}


def load(params: Params) -> Task:
    """Return the file's examples; raw inputs are uint8 or float32 ``(n, ...)``, or int32 token ids ``(n, length)``."""
    path = params.root / params.file
    if path.suffix in (".csv", ".tsv", ".parquet"):
        raise DataError(f"{path}: task=arrays reads an .npz. For this file write task=table task.file={params.file}.")
    if not path.is_file():
        raise DataError(f"arrays: missing {path}. Save x and y with numpy.savez, or set task.root and task.file.")
    arrays = cached("arrays", [path], params.keys(), lambda _: _decode(path, params))
    shape: Array | tuple[int, ...] = tuple(arrays["x_train"].shape[1:])
    if params.shape not in (None, shape):
        raise DataError(f"{path}: inputs of shape {shape}, this federation's are {params.shape} (task.shape).")
    highest = max(int(arrays[f"y_{part}"].max(initial=0)) for part in ("train", "test"))
    return finished("arrays", arrays, params, path, params.classes or highest + 1, vocabulary=params.vocabulary)


def outline(params: Params) -> Task | None:
    """Return the task without examples, for a machine without the file; None if shape or classes are not set, or if
    the file is there. Its `prepare` takes prepared inputs: uint8 and float ones differ by the scale.
    """
    if params.classes is None or params.shape is None or (params.root / params.file).exists():
        return None
    import torch

    raw = np.dtype(np.int32 if params.vocabulary else np.float32)
    none = Examples(np.empty((0, *params.shape), raw), np.empty(0, np.int64))
    prepare = token_ids if params.vocabulary else torch.from_numpy
    return Task("arrays", none, none, params.classes, params.shape, prepare, vocabulary=params.vocabulary)
