"""The pickled batches of CIFAR-10 and CIFAR-100.

torchvision downloads and checks them, but reads only complete published sets, all or nothing, by an unrestricted
unpickle and without naming a bad file. So the batches are read here: only numpy arrays and plain containers may be in
them, and every fault names its file.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.core.errors import DataError
from fedcross.tasks.reading.cache import Array

SHAPE = (3, 32, 32)


def _dtype(code: str, *_flags: int) -> np.dtype[Any]:
    """Make a dtype as the pickle asks, without its 0/1 flags: numpy 2 warns of flags that are not bool."""
    return np.dtype(code)


class _BatchUnpickler(pickle.Unpickler):
    """Reads what a CIFAR batch holds and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # numpy's own rebuilding function, wherever this version keeps it
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR batch")


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a published batch or meta file.

    Raises
    ------
    DataError
        If the file is truncated, holds anything but containers and arrays, or is no dictionary.
    """
    try:
        with path.open("rb") as file:
            content = _BatchUnpickler(file, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a whole CIFAR batch ({error}). Copy or download the file again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, expected a dictionary.")
    return content


def read_batch(path: Path, *labels: str) -> tuple[Array, ...]:
    """Return images uint8 ``(n, 3, 32, 32)`` and then one int64 array per key in `labels`.

    Raises
    ------
    DataError
        If a key is missing, or sizes or dtypes are not those of the format.
    """
    batch = read_pickle(path)
    missing = [key for key in ("data", *labels) if key not in batch]
    if missing:
        raise DataError(f"{path}: no {', '.join(missing)} in it; it has {', '.join(map(str, batch))}.")
    data = np.asarray(batch["data"])
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"{path}: data is {data.dtype} {data.shape}, expected uint8 (n, 3072).")
    out: list[Array] = [data.reshape(-1, *SHAPE)]
    for key in labels:
        y = np.asarray(batch[key])
        if y.shape != (len(data),) or y.dtype.kind not in "iu":
            raise DataError(f"{path}: {len(data)} images but {key} is {y.dtype} {y.shape}.")
        out.append(y.astype(np.int64))
    return tuple(out)


def names(path: Path, key: str, fallback: int) -> tuple[str, ...]:
    """Return the label names of a meta file; ``0, 1, ...`` up to `fallback` if there is no such file."""
    if not path.is_file():
        return tuple(str(label) for label in range(fallback))
    return tuple(str(name) for name in read_pickle(path).get(key, ()))
