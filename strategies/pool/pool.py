"""K middleware models as one flat (K, d) buffer, and the layout of one model as a row of it.

A row is laid out as::

    | parameters, in state_dict order (p values) | float buffers, in state_dict order (d - p) |

Integer entries (batch counters) lie in a second row of int64, so that no counter passes through a float32. Uploads are
written directly into their row, models are read as views of it, and mixing is in place.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.errors import ConfigError, StorageError, UploadError
from fedcross.core.settings import Settings
from fedcross.strategies.pool import loops

if TYPE_CHECKING:
    from fedcross.strategies.pool.mixing import Mixing

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
"""A model's ``state_dict`` as numpy arrays, in its order."""
NEAR = 1e-6  # a mixed counter this near an integer is that integer


@dataclass(frozen=True)
class Entry:
    """Position of one entry of the ``state_dict``: its first value has index `start` in the float or integer row."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    is_parameter: bool

    @property
    def is_integer(self) -> bool:
        """Whether the entry lies in the integer row (bool counts as integer)."""
        return self.dtype.kind in "iub"

    @property
    def stop(self) -> int:
        """Index after its last value."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The order of a model's values in a row; :meth:`of` creates it.

    Parameters
    ----------
    entries : tuple of Entry
        In ``state_dict`` order.
    dtype : numpy dtype
        Of every float entry: float32 or float64.
    size, parameter_size, integer_size : int
        d, all float values; p, the parameters, which come first; the integer values.
    """

    entries: tuple[Entry, ...]
    dtype: np.dtype[Any]
    size: int
    parameter_size: int
    integer_size: int

    @classmethod
    def of(cls, arrays: Mapping[str, Array], parameters: Collection[str] | None = None) -> Layout:
        """Lay out the model `arrays`; `parameters` are the trained entries, None means every float entry.

        Raises
        ------
        ConfigError
            If there is no float entry, a dtype is not supported, float dtypes differ, or a parameter is not a float.
        """
        faults = _dtype_faults(arrays)
        floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        trained = set(floats if parameters is None else parameters)
        faults += [f"parameter {name!r} is not a float entry of the model." for name in sorted(trained - set(floats))]
        if not floats:
            faults.append(f"the model has no float entry, only {sorted(arrays)}. Give a model with weights.")
        if faults:
            raise ConfigError(faults)
        starts: dict[str, int] = {}
        sizes = []
        for group in (
            [name for name in floats if name in trained] + [name for name in floats if name not in trained],
            [name for name in arrays if arrays[name].dtype.kind != "f"],
        ):
            position = 0
            for name in group:
                starts[name] = position
                position += arrays[name].size
            sizes.append(position)
        entries = tuple(Entry(name, a.shape, a.dtype, starts[name], name in trained) for name, a in arrays.items())
        return cls(entries, arrays[floats[0]].dtype, sizes[0], sum(arrays[name].size for name in trained), sizes[1])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all entries in ``state_dict`` order."""
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def spec(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Required shapes and dtypes of a model: name -> (shape, dtype's name), in order, read-only."""
        return MappingProxyType({entry.name: (entry.shape, str(entry.dtype)) for entry in self.entries})

    def columns(self, part: str) -> slice:
        """Return the columns of ``"parameters"`` or of the whole ``"state"`` in the float row."""
        return slice(0, {"parameters": self.parameter_size, "state": self.size}[part])

    def views(self, row: Array, integers: NDArray[np.int64]) -> Arrays:
        """Return the model in a row (d,) as views; integer entries of another dtype than int64 are copies."""
        model: Arrays = {}
        for entry in self.entries:
            part = (integers if entry.is_integer else row)[entry.start : entry.stop].reshape(entry.shape)
            model[entry.name] = part.astype(entry.dtype, copy=False)
        return model

    def write(self, arrays: Mapping[str, Array], row: Array, integers: NDArray[np.int64]) -> None:
        """Copy a model into a row, or raise an UploadError as :meth:`check` does and write nothing."""
        self.check(arrays, self.spec)
        for entry in self.entries:
            part = (integers if entry.is_integer else row)[entry.start : entry.stop]
            part[...] = arrays[entry.name].reshape(-1)

    def check(self, arrays: Mapping[str, Array], spec: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Raise UploadError (``wrong_names``, ``wrong_shape``, ``wrong_dtype``) unless `arrays` is of `spec`."""
        if set(arrays) != set(spec):
            raise UploadError("wrong_names", f"missing or unknown: {sorted(set(arrays) ^ set(spec))}")
        for name, (shape, dtype) in spec.items():
            if arrays[name].shape != shape:
                raise UploadError("wrong_shape", f"{name} has shape {arrays[name].shape}, expected {shape}")
            if str(arrays[name].dtype) != dtype:
                raise UploadError("wrong_dtype", f"{name} has dtype {arrays[name].dtype}, expected {dtype}")


def _dtype_faults(arrays: Mapping[str, Array]) -> list[str]:
    faults, floats = list[str](), dict[np.dtype[Any], str]()
    for name, array in arrays.items():
        if array.dtype in (np.float32, np.float64):
            floats.setdefault(array.dtype, name)
        elif array.dtype.kind not in "iub" or array.dtype == np.uint64:
            faults.append(f"entry {name!r} has dtype {array.dtype}. Use float32, float64, bool or integers.")
    if len(floats) > 1:
        seen = ", ".join(f"{dtype} ({name!r})" for dtype, name in floats.items())
        faults.append(f"the model mixes float dtypes: {seen}. Use one of them for all float entries.")
    return faults


class Storage(Settings):
    """Where a pool is stored.

    Parameters
    ----------
    mmap_share : float
        A pool larger than this share of the machine's (or the container's) memory is kept in a memory-mapped file; with
        0 every pool is.
    folder : path, optional
        Folder of that file; None is the system's temporary folder. The file has no name and disappears with the pool or
        the process.
    """

    mmap_share: float = Field(default=0.5, ge=0)
    folder: Path | None = None


class Pool:
    """K models of one layout.

    Parameters
    ----------
    layout : Layout
        Layout of every model.
    k : int
        Number of models, 1 or more.
    storage : Storage, optional
        When and where to use a file instead of memory.

    Attributes
    ----------
    rows : float array (K, d)
        The models' float values, C-contiguous.
    integers : int64 array (K, i)
        Their integer entries.
    """

    def __init__(self, layout: Layout, k: int, storage: Storage | None = None) -> None:
        self.layout = layout
        self.storage = storage or Storage()
        self.rows, self.integers = self._allocate(k)

    def __len__(self) -> int:
        return len(self.rows)

    def _allocate(self, k: int) -> tuple[Array, NDArray[np.int64]]:
        if k < 1:
            raise ValueError(f"a pool needs at least one model, not {k}")
        shape, dtype = (k, self.layout.size), self.layout.dtype
        integers = np.zeros((k, self.layout.integer_size), np.int64)
        size = k * self.layout.size * dtype.itemsize
        if size <= self.storage.mmap_share * memory_bytes():
            return np.empty(shape, dtype), integers
        folder = self.storage.folder
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS later
                return np.asarray(np.memmap(file, dtype, "r+", shape=shape)), integers
        except OSError as error:
            raise StorageError(
                f"no room for a pool of {k} models, {size} bytes, in {folder or 'the temporary folder'}: {error}. "
                "Free space there, name another folder or raise mmap_share."
            ) from error

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Make every model a copy of `arrays`."""
        self.write(0, arrays)
        self.rows[1:], self.integers[1:] = self.rows[0], self.integers[0]

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model into row i; raise an UploadError if it is not of this layout, the row is then unchanged."""
        self.layout.write(arrays, self.rows[i], self.integers[i])

    def model(self, i: int) -> Arrays:
        """Return model i as views of the pool."""
        return self.layout.views(self.rows[i], self.integers[i])

    def mean(self, members: Sequence[int] | None = None) -> Arrays:
        """Return the uniform mean of the `members` (None: of all): floats summed in float64, integers truncated."""
        return self.layout.views(*self.mean_row(members))

    def mean_row(
        self, members: Sequence[int] | None = None, out: Array | None = None
    ) -> tuple[Array, NDArray[np.int64]]:
        """Return :meth:`mean` as one row of float values (d,), `out` if given, and a new one of integers (i,)."""
        slots = self.slots(members)
        row = np.empty(self.layout.size, self.layout.dtype) if out is None else out
        loops.mean(self.rows, slots, row)
        return row, self.mean_integers(slots)

    def mean_integers(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the mean (i,) of the integer entries of `slots`."""
        mean: NDArray[np.int64] = mixed_integers(self.integers[slots], np.full((1, len(slots)), 1 / len(slots)))[0]
        return mean

    def slots(self, members: Sequence[int] | NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Return `members` as an array of slots, one at least; None is all."""
        slots = np.arange(len(self)) if members is None else np.asarray(members, np.int64)
        if not len(slots):
            raise ValueError("no member of the pool was named; give at least one slot")
        return slots

    def gram(self, members: Sequence[int] | None = None, columns: slice | None = None) -> NDArray[np.float64]:
        """Return the inner products (m, m) of the members' rows over `columns` (None: all), from one pass."""
        return loops.gram(self.rows, self.slots(members), columns or slice(None))

    def mix(self, mixing: Mixing) -> None:
        """Replace the pool by ``M @ pool``, in place.

        Rows that keep their model are not written, and a value that all models share stays exactly the same. Integer
        entries are mixed as :func:`mixed_integers` says.
        """
        if len(mixing.rows) != len(self):
            raise ValueError(f"a mixing of {len(mixing.rows)} slots does not fit a pool of {len(self)}")
        targets = mixing.targets
        if len(targets):
            loops.mix(self.rows, targets, *mixing.padded())
            self._mix_integers(mixing)

    def _mix_integers(self, mixing: Mixing) -> None:
        self.integers[mixing.targets] = mixed_integers(self.integers, mixing.dense()[mixing.targets])

    def resize(self, k: int) -> None:
        """Change the number of models; the mean of the pool stays the same.

        Growing adds copies of the mean. Shrinking keeps the first k models and adds (old mean - their mean) to their
        parameters. Their float buffers are set to the old mean instead, because a shifted running variance could become
        negative. Integer entries of the remaining models do not change.
        """
        old, p = len(self), self.layout.parameter_size
        if k == old:
            return
        mean, integers = self.mean_row()
        survivors = self.mean_row(range(min(k, old)))[0] if k < old else mean
        rows, counters = self.rows, self.integers
        self.rows, self.integers = self._allocate(k)
        self.rows[:old], self.integers[:old] = rows[:k], counters[:k]
        if k > old:
            self.rows[old:], self.integers[old:] = mean, integers
        else:
            self.rows[:, :p] += mean[:p] - survivors[:p]
            self.rows[:, p:] = mean[p:]

    def state(self) -> dict[str, Array]:
        """Return the pool as arrays, without copying: a later mixing changes them."""
        return {"rows": self.rows, "integers": self.integers}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the models of :meth:`state`, however many; raise a StorageError if they are of another layout."""
        rows, integers = state["rows"], state["integers"]
        wanted = (len(rows), self.layout.size), self.layout.dtype, (len(rows), self.layout.integer_size)
        if (rows.shape, rows.dtype, integers.shape) != wanted or not len(rows):
            raise StorageError(
                f"a stored pool has rows {rows.shape} {rows.dtype} and integers {integers.shape}, expected {wanted}. "
                "Resume with the model the run began with."
            )
        if len(rows) != len(self):
            self.rows, self.integers = self._allocate(len(rows))
        self.rows[...], self.integers[...] = rows, integers


def mixed_integers(values: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[Any]:
    """Return weighted means of integers, ``weights @ values``.

    A mean within 1e-6 of an integer becomes that integer, another is truncated towards zero. A value that all sources
    share stays as it is, however large.

    Parameters
    ----------
    values : integer or bool array (n, i)
        The sources.
    weights : float64 array (m, n)
        Rows sum to 1; with 0 a value is no source.

    Returns
    -------
    array (m, i)
        Of the dtype of `values`.
    """
    floats = values.astype(np.float64)
    mixed = np.empty((len(weights), values.shape[1]), values.dtype)
    for row, shares in zip(mixed, weights):
        sources = np.flatnonzero(shares)
        first = floats[sources[0]]
        mean = first + shares[sources] @ (floats[sources] - first)
        shared = (values[sources] == values[sources[0]]).all(axis=0)
        row[...] = np.where(shared, values[sources[0]], whole(mean).astype(values.dtype))
    return mixed


def whole(values: Array) -> Array:
    """Return float64 `values` within 1e-6 of an integer as that integer, others truncated towards zero."""
    nearest = np.rint(values)
    found = np.where(np.abs(values - nearest) <= NEAR, nearest, np.trunc(values))
    return np.clip(found, -(2.0**63), np.nextafter(2.0**63, 0))


def pulled(values: NDArray[np.int64], own: float) -> NDArray[np.int64]:
    """Return integers `values` (n, i), each drawn to the mean of the n: ``own v_i + (1 - own) mean``."""
    n = len(values)
    return mixed_integers(values, own * np.eye(n) + (1 - own) / n)


@np.errstate(over="ignore", invalid="ignore")  # of models that are not finite: null in metrics.jsonl
def diagnostics(gram: NDArray[np.float64], mixing: Mixing | None = None) -> dict[str, float]:
    """Return how similar the models of a pool are, from their Gram matrix (m, m) of :meth:`Pool.gram`.

    ``pool_similarity_mean`` is the mean cosine over all pairs (1 if there is one model), ``pool_spread`` the root
    mean square distance of the models to their mean, relative to the mean's norm. With `mixing` they are those of the
    pool after it, whose Gram matrix is ``M G M^T``. In a pool of several widths they are of the narrowest corner.
    """
    if mixing is not None:
        matrix = mixing.dense()
        gram = matrix @ gram @ matrix.T
    m = len(gram)
    squares = np.maximum(np.diag(gram), 0.0)  # models that cancel each other mix to rounding noise of either sign
    mean_square = gram.sum() / m**2
    scale = np.sqrt(np.outer(squares, squares))
    cosine = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    pairs = cosine[~np.eye(m, dtype=bool)]
    spread = np.sqrt(max(0.0, squares.mean() - mean_square) / mean_square) if mean_square > 0 else 0.0
    return {"pool_similarity_mean": float(pairs.mean()) if m > 1 else 1.0, "pool_spread": float(spread)}


def memory_bytes() -> int:
    """Return the bytes of memory this process may use: the machine's, or less if its container says so."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine
