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
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedcross.core.errors import ConfigError, StorageError
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
    """One entry of the ``state_dict``: its first value has index `start` in the float or integer row."""

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
    """The order of a model's values in a row; :meth:`of` creates it."""

    entries: tuple[Entry, ...]  #: in ``state_dict`` order
    dtype: np.dtype[Any]  #: of every float entry: float32 or float64
    size: int  #: d, all float values
    parameter_size: int  #: p, the parameters, which come first
    integer_size: int

    @classmethod
    def of(cls, arrays: Mapping[str, Array], parameters: Collection[str] | None = None) -> Layout:
        """Return the layout of a model; `parameters` are its trained entries, all float ones if None.

        Raise a ConfigError for a dtype that cannot be stored or averaged, unless there is one float dtype, and if a
        parameter is not a float entry.
        """
        floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        trained = set(floats if parameters is None else parameters)
        odd = {
            n: str(a.dtype)
            for n, a in arrays.items()
            if a.dtype.kind not in "fiub" or a.dtype in (np.uint64, np.float16)
        }
        dtypes = {str(arrays[name].dtype): name for name in floats}
        faults = [
            f"entry {name!r} has dtype {dtype}. Use float32, float64, bool or integers." for name, dtype in odd.items()
        ]
        faults += [f"parameter {name!r} is not a float entry of the model." for name in sorted(trained - set(floats))]
        if len(dtypes) != 1:
            faults.append(f"the model's float dtypes are {dtypes}. Use one of float32 and float64 for all its weights.")
        if faults:
            raise ConfigError(faults)
        rows = (
            [name for name in floats if name in trained] + [name for name in floats if name not in trained],
            [name for name in arrays if arrays[name].dtype.kind != "f"],
        )
        ends = [np.cumsum([0, *(arrays[name].size for name in row)]).tolist() for row in rows]
        starts = {name: start for row, own in zip(rows, ends) for name, start in zip(row, own)}
        entries = tuple(Entry(name, a.shape, a.dtype, starts[name], name in trained) for name, a in arrays.items())
        return cls(entries, arrays[floats[0]].dtype, ends[0][-1], ends[0][len(trained)], ends[1][-1])

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


class Storage(Settings):
    """Where a pool is stored.

    A pool larger than the share `mmap_share` of the machine's (or the container's) memory is kept in a memory-mapped
    file in `folder` (None: the system's temporary folder). The file has no name and disappears with the process.
    """

    mmap_share: float = Field(default=0.5, ge=0)
    folder: Path | None = None


class Pool:
    """K models of one layout: `rows` (K, d) are their float values, `integers` int64 (K, i) their integer entries."""

    def __init__(self, layout: Layout, k: int, storage: Storage | None = None) -> None:
        self.layout = layout
        self.storage = storage or Storage()
        self.rows, self.integers = self._allocate(k)

    def __len__(self) -> int:
        return len(self.rows)

    def _allocate(self, k: int) -> tuple[Array, NDArray[np.int64]]:
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
            where = (
                f"{size} bytes, in {folder or 'the temporary folder'}: {error}. Free space there, name another folder"
            )
            raise StorageError(f"no room for a pool of {k} models, {where} or raise mmap_share.") from error

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Make every model a copy of `arrays`."""
        self.write(0, arrays)
        self.rows[1:], self.integers[1:] = self.rows[0], self.integers[0]

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model of this layout into row i."""
        for entry in self.layout.entries:
            row = (self.integers if entry.is_integer else self.rows)[i]
            row[entry.start : entry.stop] = arrays[entry.name].reshape(-1)

    def model(self, i: int) -> Arrays:
        """Return model i as views of the pool."""
        return self.layout.views(self.rows[i], self.integers[i])

    def mean(self, members: Sequence[int] | None = None) -> Arrays:
        """Return the uniform mean of the `members` (None: of all): floats summed in float64, integers truncated."""
        return self.layout.views(*self.mean_row(members))

    def mean_row(self, members: Sequence[int] | None = None) -> tuple[Array, NDArray[np.int64]]:
        """Return :meth:`mean` as a new row of float values (d,) and one of integers (i,)."""
        slots, row = self._slots(members), np.empty(self.layout.size, self.layout.dtype)
        loops.mean(self.rows, slots, row)
        return row, self.mean_integers(slots)

    def mean_integers(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the mean (i,) of the integer entries of `slots`."""
        mean: NDArray[np.int64] = mixed_integers(self.integers[slots], np.full((1, len(slots)), 1 / len(slots)))[0]
        return mean

    def _slots(self, members: Sequence[int] | None) -> NDArray[np.int64]:
        return np.arange(len(self)) if members is None else np.asarray(members, np.int64)

    def gram(self, members: Sequence[int] | None = None, columns: slice | None = None) -> NDArray[np.float64]:
        """Return the inner products (m, m) of the members' rows over `columns` (None: all), from one pass."""
        return loops.gram(self.rows, self._slots(members), columns or slice(None))

    def mix(self, mixing: Mixing) -> None:
        """Replace the pool by ``M @ pool``, in place.

        Rows that keep their model are not written, and a value that all models share stays exactly the same.
        """
        if len(targets := mixing.targets):
            loops.mix(self.rows, targets, *mixing.padded())
            self.integers[targets] = mixed_integers(self.integers, mixing.dense()[targets])

    def follow(self, own: float, mean: Array, step: Array, push: float) -> None:
        """Set ``w_i = own v_i + (1 - own) mean + push step`` for all slots; `mean` and `step` are rows (d,).

        Integer entries are pulled to their own mean. A `push` of 0 keeps a value that all slots share with the mean.
        """
        import torch

        self.integers[...] = pulled(self.integers, own)
        rows, target, factor = torch.from_numpy(self.rows), torch.from_numpy(mean), self.rows.dtype.type(push)

        def task(_: int, columns: slice) -> None:
            rows[:, columns].lerp_(target[columns], 1 - own).add_(torch.from_numpy(step[columns] * factor))

        loops.over_blocks(task, len(self), self.rows.itemsize, 0, self.rows.shape[1])

    def resize(self, k: int) -> None:
        """Change the number of models; the mean of the pool stays the same.

        Growing adds copies of the mean. Shrinking keeps the first k models and adds (old mean - their mean) to their
        parameters. Their float buffers become the old mean, because a shifted running variance could be negative.
        """
        old, p = len(self), self.layout.parameter_size
        if k == old:
            return
        mean, integers = self.mean_row()
        survivors = self.mean_row(range(min(k, old)))[0]
        rows, counters = self.rows, self.integers
        self.rows, self.integers = self._allocate(k)
        self.rows[:old], self.integers[:old] = rows[:k], counters[:k]
        self.rows[old:], self.integers[old:] = mean, integers
        if k < old:
            self.rows[:, :p] += mean[:p] - survivors[:p]
            self.rows[:, p:] = mean[p:]

    def state(self) -> dict[str, Array]:
        """Return the pool as arrays, without copying: a later mixing changes them."""
        return {"rows": self.rows, "integers": self.integers}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the models of :meth:`state`, however many."""
        if len(state["rows"]) != len(self):
            self.rows, self.integers = self._allocate(len(state["rows"]))
        self.rows[...], self.integers[...] = state["rows"], state["integers"]


def mixed_integers(values: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[Any]:
    """Return weighted means of integers ``weights @ values`` (m, i), of the dtype of `values` (n, i).

    A mean within 1e-6 of an integer becomes that integer, another is truncated towards zero. A value that all sources
    (those of a weight above 0) share stays as it is, however large. Rows of `weights` (m, n) sum to 1.
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


def memory_bytes() -> int:
    """Return the bytes of memory this process may use: the machine's, or less if its container says so."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine
