"""K middleware models as one flat (K, d) buffer, and the layout of one model as a row of it.

A row has the p parameters in ``state_dict`` order, then the d - p values of float buffers. Integer entries (batch
counters) lie in a second row of int64, so that no counter passes through a float32. Uploads are written directly into
their row, full models are read as views of it, and mixing is in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.mixing import Matrix, among, mixed_integers

if TYPE_CHECKING:
    from fedcross.tasks.models.width import Corners, Width

Array: TypeAlias = NDArray[Any]
Integers: TypeAlias = NDArray[np.int64]
Arrays: TypeAlias = dict[str, Array]
"""A model's ``state_dict`` as numpy arrays, in its order."""


@dataclass(frozen=True)
class Entry:
    """One entry of the ``state_dict``."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: slice  #: its values in the float or integer row
    is_parameter: bool
    is_integer: bool  #: bool counts as integer


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
        floats = {name: str(array.dtype) for name, array in arrays.items() if array.dtype.kind == "f"}
        trained, kinds = set(floats if parameters is None else parameters), sorted(set(floats.values()))
        faults = [
            f"entry {name!r} has dtype {array.dtype}. Use float32, float64, bool or integers."
            for name, array in arrays.items()
            if array.dtype.kind not in "fiub" or array.dtype in (np.uint64, np.float16)
        ]
        faults += [f"parameter {name!r} is not a float entry of the model." for name in sorted(trained - set(floats))]
        faults += [] if len(kinds) == 1 else [f"the model's float dtypes are {kinds}. Use float32 or float64 for all."]
        if faults:
            raise ConfigError(faults)
        p, entries = sum(arrays[name].size for name in trained), []
        ends = {"parameter": 0, "buffer": p, "integer": 0}
        for name, array in arrays.items():
            kind = "parameter" if name in trained else "buffer" if name in floats else "integer"
            place = slice(ends[kind], ends[kind] + array.size)
            entries.append(Entry(name, array.shape, array.dtype, place, kind == "parameter", kind == "integer"))
            ends[kind] = place.stop
        return cls(tuple(entries), np.dtype(kinds[0]), ends["buffer"], p, ends["integer"])

    def columns(self, part: str) -> slice:
        """Return the columns of ``"parameters"`` or of the whole ``"state"`` in the float row."""
        return slice(0, {"parameters": self.parameter_size, "state": self.size}[part])


class Band(NamedTuple):
    """Columns that the widths of `rank` and above have (0 is the narrowest); the narrower ones have none of them."""

    columns: slice
    rank: int
    trained: bool


class Pool:
    """K models of one layout: `rows` (K, d) are their float values, `integers` (K, i) their integer entries.

    With `widths`, one for each slot, a narrow model is the corner of its row that `corners` say; the rest is zero and
    not read. Columns are then ordered so that every corner is a few whole runs of columns, *bands*. Weights are mixed
    and averaged among the models that have them, float buffers and counters among the models of one width.
    """

    def __init__(
        self,
        layout: Layout,
        k: int,
        widths: Sequence[Width] = (),
        corners: Corners | None = None,
    ) -> None:
        from fedcross.tasks.models.width import FULL

        self.layout, self.corners = layout, corners
        self.widths = list(widths) or [FULL] * k  #: of each slot
        self.levels = sorted(set(self.widths))  #: the widths in the pool, the narrowest first
        self.ranks = np.array([self.levels.index(width) for width in self.widths])  #: of the slots' widths among these
        self.rows, self.integers = self._allocate(k)
        self.columns: Integers | None = None  #: of each value of the full model; None: in the order of the layout
        self.bands = [Band(slice(0, layout.size), 0, True)]
        if corners is not None and self.levels != [FULL]:
            self.rows[...] = 0
            self._order(corners)

    def _order(self, corners: Corners) -> None:
        """Order the columns: parameters first, then by the narrowest width that has them."""
        size, levels = self.layout.size, len(self.levels)
        key = np.full(size, levels, np.int64)
        for rank, width in reversed(list(enumerate(self.levels))):
            for entry in self.layout.entries:
                if not entry.is_integer:
                    key[entry.place].reshape(entry.shape)[corners.index(entry.name, width)] = rank
        key[self.layout.parameter_size :] += levels + 1
        order = np.argsort(key, kind="stable")
        self.columns, key = np.argsort(order), key[order]
        edges = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), size]
        self.bands = [Band(slice(a, b), int(key[a]) % (levels + 1), key[a] <= levels) for a, b in pairwise(edges)]

    def __len__(self) -> int:
        return len(self.rows)

    def _allocate(self, k: int) -> tuple[Array, Integers]:
        return np.empty((k, self.layout.size), self.layout.dtype), np.zeros((k, self.layout.integer_size), np.int64)

    def fill(self, arrays: Mapping[str, Array], slots: Sequence[int] | None = None) -> None:
        """Make the models of `slots` (None: all) copies of `arrays`, a full model, each cut to its width."""
        for slot in self._slots(slots):
            self.write(slot, self.corners.corner(arrays, self.widths[slot]) if self.corners else arrays)

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model of the slot's width into row i."""
        for entry in self.layout.entries:
            row = (self.integers if entry.is_integer else self.rows)[i]
            row[self._place(entry, self.widths[i])[0]] = arrays[entry.name].reshape(-1)

    def model(self, i: int) -> Arrays:
        """Return model i; a full one as views of the pool."""
        return self.arrays(self.rows[i], self.integers[i], self.widths[i])

    def arrays(self, row: Array, integers: Integers, width: Width | None = None) -> Arrays:
        """Return what a model of `width` (None: the widest) has of a row (d,); integers (i,) as their own dtype."""
        model: Arrays = {}
        for entry in self.layout.entries:
            at, shape = self._place(entry, width or self.levels[-1])
            part = (integers if entry.is_integer else row)[at]
            model[entry.name] = part.reshape(shape).astype(entry.dtype, copy=False)
        return model

    def _place(self, entry: Entry, width: Width) -> tuple[slice | Integers, tuple[int, ...]]:
        """Return where an entry of a model of `width` lies in a row, and its shape."""
        if self.corners is None or self.columns is None or entry.is_integer:
            return entry.place, entry.shape
        full = self.columns[entry.place].reshape(entry.shape)
        return full[self.corners.index(entry.name, width)].reshape(-1), self.corners.shape(entry.name, width)

    def mean(self, members: Sequence[int] | None = None, rank: int = -1) -> Arrays:
        """Return :meth:`mean_row` as a model."""
        return self.arrays(*self.mean_row(members, rank), self.levels[rank])

    def mean_row(self, members: Sequence[int] | None = None, rank: int = -1) -> tuple[Array, Integers]:
        """Return the uniform mean (d,) of the `members` (None: all), summed in float64, and of their integers (i,).

        With widths, what the width of `rank` among the `levels` has: each weight over the members that have it, the
        rest over those of this width. Integers are truncated.
        """
        slots, rank = self._slots(members), range(len(self.levels))[rank]
        ranks, row = self.ranks[slots], np.zeros(self.layout.size, self.layout.dtype)
        for band in self.bands:
            if band.rank <= rank:
                have = ranks >= band.rank if band.trained else ranks == rank
                loops.mean(self.rows[:, band.columns], slots[have], row[band.columns])
        own = self.integers[slots[ranks == rank]]
        return row, mixed_integers(own, np.full((1, len(own)), 1 / max(1, len(own))))[0]

    def means(self) -> tuple[Array, Integers]:
        """Return the mean of all models for each of the L `levels`: rows (L, d) and integers (L, i)."""
        rows, integers = zip(*(self.mean_row(rank=rank) for rank in range(len(self.levels))))
        return np.stack(rows), np.stack(integers)

    def _slots(self, members: Sequence[int] | Integers | None) -> Integers:
        return np.arange(len(self)) if members is None else np.asarray(members, np.int64)

    def gram(self, members: Sequence[int] | Integers | None = None, columns: slice | None = None) -> Matrix:
        """Return the inner products (m, m) of the members' rows over `columns` (None: all), from one pass.

        With widths they are those of the narrowest corner's parameters, whatever the columns.
        """
        part = columns if columns is not None and self.columns is None else self.bands[0].columns
        return loops.gram(self.rows, self._slots(members), part)

    def mix(self, mixing: Matrix) -> None:
        """Replace the pool by ``M @ pool``, in place, each value among the slots that have it.

        Rows that keep their model are not written, and a value that all models share stays exactly the same.
        """
        ranks = self.ranks
        own = among(mixing, ranks[:, None] == ranks)
        for band in self.bands:
            have = ranks >= band.rank
            loops.mix(self.rows[:, band.columns], among(mixing if band.trained else own, have[:, None] & have))
        targets = loops.sources(own)[0]
        self.integers[targets] = mixed_integers(self.integers, own[targets])

    def pull(self, own: float, means: Array, members: Sequence[int] | None = None, shift: Array | None = None) -> None:
        """Set ``w_i = own v_i + (1 - own) mean + shift`` for the members; `means` (L, d) are those of the levels.

        Integer entries are pulled to the mean of the members of their width. A value that all members share with the
        mean stays, unless `shift` (d,) moves it.
        """
        pulled = self._slots(members)
        for rank, mean in enumerate(means):
            slots = pulled[self.ranks[pulled] == rank]
            for band in self.bands:
                if band.rank <= rank:
                    loops.pull(self.rows, slots, own, mean, shift, band.columns)
            weights = own * np.eye(len(slots)) + (1 - own) / max(1, len(slots))
            self.integers[slots] = mixed_integers(self.integers[slots], weights)

    def resize(self, k: int) -> None:
        """Change the number of models; the mean of the pool stays the same. Models of several widths are refused.

        Growing adds copies of the mean. Shrinking keeps the first k models and adds (old mean - their mean) to their
        parameters. Their float buffers become the old mean, because a shifted running variance could be negative.
        """
        old, p, rows, counters = len(self), self.layout.parameter_size, self.rows, self.integers
        if k != old and self.corners is not None:
            raise ConfigError(f"a pool of {old} models of several widths cannot have {k}: keep method.k.")
        mean, integers = self.mean_row()
        survivors = self.mean_row(range(min(k, old)))[0]
        self.rows, self.integers = self._allocate(k)
        self.widths, self.ranks = self.widths[:1] * k, np.zeros(k, np.int64)
        self.rows[:old], self.integers[:old] = rows[:k], counters[:k]
        self.rows[old:], self.integers[old:] = mean, integers
        if k < old:
            self.rows[:, :p] += mean[:p] - survivors[:p]
            self.rows[:, p:] = mean[p:]

    def state(self) -> Arrays:
        """Return the pool as arrays, without copying: a later mixing changes them."""
        return {"rows": self.rows, "integers": self.integers}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the models of :meth:`state`, however many."""
        if (k := len(state["rows"])) != len(self):
            self.resize(k)
        self.rows[...], self.integers[...] = state["rows"], state["integers"]
