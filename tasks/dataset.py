"""A data set of the library ``datasets`` on disk: what its ``save_to_disk`` wrote, a ``Dataset`` or a ``DatasetDict``.

One column is the input: pictures, texts, or arrays of numbers; several columns of numbers together are feature vectors.
Of a ``DatasetDict`` the parts ``train`` and ``test`` are read; without ``test``, `test_fraction` of every class is held
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedcross.core.errors import DataError, nearest, needed
from fedcross.tasks.base import Task
from fedcross.tasks.reading.cache import Array, Arrays, cached
from fedcross.tasks.reading.params import PARTS, ImageParams, finished, split_parts
from fedcross.tasks.reading.pictures import shaped
from fedcross.tasks.reading.tables import LabelParams, coded, column, labelled
from fedcross.tasks.reading.words import WordParams, text_arrays


class Params(LabelParams, WordParams, ImageParams):
    """Settings of a data set on disk.

    Attributes
    ----------
    inputs : tuple of str or None
        The column with the inputs, or several columns of numbers; None for all but the label and the owners.
    size, channels : int
        Pictures: pixels of a side; 1 for grey, 3 for colour.
    """

    inputs: tuple[str, ...] | None = None
    size: int = Field(default=32, ge=1)
    channels: Literal[1, 3] = 3


def _open(params: Params) -> dict[str, Any]:
    """Return the parts ``train`` and, if there is one, ``test``."""
    datasets = needed("datasets", "data", f"task.root={params.root}")
    try:
        found = datasets.load_from_disk(str(params.root))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{params.root}: not a data set that save_to_disk wrote. Set task.root to one.") from error
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    if not len(parts.get("train", ())):
        raise DataError(f"{params.root}: it has the parts {', '.join(parts)}, but no examples in train.")
    return {part: parts[part] for part in PARTS if part in parts}


def _check_columns(rows: Any, names: Sequence[str], setting: str, where: str) -> None:
    if lacking := [name for name in names if name not in rows.column_names]:
        raise DataError(f"{where}: no column {lacking[0]!r} ({setting}). {nearest(lacking[0], rows.column_names)}")


def _inputs(rows: Any, params: Params, where: str) -> Array | list[str]:
    """Return pictures as uint8, numbers as float32 with channels, or texts as a list."""
    datasets = needed("datasets", "data", where)
    names = params.inputs or tuple(n for n in rows.column_names if n not in (params.label, params.users))
    _check_columns(rows, names or ("inputs",), "task.inputs", where)
    kind = rows.features[names[0]]
    if isinstance(kind, datasets.Image):
        return np.stack([shaped(picture, params.size, params.channels) for picture in rows[names[0]]])
    if isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string") and len(names) == 1:
        return list(map(str, column(rows.select_columns(list(names)).to_pandas(), *names, "task.inputs", where)))
    if isinstance(kind, datasets.Value):
        return coded(rows.select_columns(list(names)).to_pandas(), names, {}, where)[0]
    try:
        x = np.asarray(rows.with_format("numpy")[names[0]][:], dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: column {names[0]!r} holds no arrays of numbers of one shape.") from error
    if x.ndim not in (2, 3, 4) or not np.isfinite(x).all():
        raise DataError(f"{where}: column {names[0]!r} of shape {x.shape} must be finite, of 1 to 3 dimensions each.")
    return x[:, None] if x.ndim == 3 else x


def _decode(params: Params) -> Arrays:
    rows = _open(params)
    wanted = [name for name in (params.label, params.users) if name is not None]
    for part, one in rows.items():
        _check_columns(one, wanted, "task.label, task.users", f"{params.root} ({part})")
    tables = {part: one.select_columns(wanted).to_pandas() for part, one in rows.items()}
    names = getattr(rows["train"].features[params.label], "names", None)  # of a ClassLabel, whose cells are numbers
    if names:
        for table in tables.values():
            table[params.label] = table[params.label].map(dict(enumerate(names)))
    parts, known = labelled(tables, params, names or (), params.root)
    inputs = {part: _inputs(one, params, f"{params.root} ({part})") for part, one in rows.items()}
    if isinstance(inputs["train"], list):
        return {**text_arrays(parts, inputs, params, params.test_fraction), **known}  # type: ignore[arg-type]
    whole = {part: {"x": np.asarray(x), **parts[part]} for part, x in inputs.items()}
    return {**split_parts(whole, params.test_fraction, "dataset test split"), **known}


def load(params: Params) -> Task:
    """Return the data set's examples: uint8 pictures, float32 numbers, or int32 token ids ``(n, length)``."""
    sources = sorted(path for path in params.root.rglob("*") if path.is_file())
    arrays = cached("dataset", sources, params.keys(), lambda _: _decode(params))
    return finished("dataset", arrays, params, params.root)
