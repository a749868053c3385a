"""A pool of models of several widths, each the leading corner of a full one: how corners are mixed and averaged.

Every weight is mixed or averaged among the models that have it; a model keeps what the others lack. Float buffers and
counters (the statistics of batch normalisation) belong to a width: they mix and average among models of one width only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.mixing import Matrix, Mixing
from fedcross.strategies.pool.pool import Array, Arrays, Entry, Layout, Pool, Storage, pulled
from fedcross.tasks.models.width import Corners, Width


class Band(NamedTuple):
    """Columns that the widths of `rank` and above have (0 is the narrowest)."""

    columns: slice
    rank: int
    trained: bool


class WidthPool(Pool):
    """K models of several widths: full rows, of which a narrow model uses the columns of its corner.

    The columns are ordered so that every corner is a few whole runs of columns, *bands*. Columns beyond a slot's
    corner are zero and nobody reads them.

    Parameters
    ----------
    layout : Layout
        Layout of the full model.
    widths : sequence of Width
        Width of each slot.
    corners : Corners
        Shapes of the model at every width.
    storage : Storage, optional
        When and where to use a file instead of memory.
    """

    def __init__(
        self, layout: Layout, widths: Sequence[Width], corners: Corners, storage: Storage | None = None
    ) -> None:
        super().__init__(layout, len(widths), storage)
        self.rows[...] = 0
        self.corners, self.widths = corners, tuple(widths)
        #: The widths in the pool, the narrowest first, and the rank of each slot's among them.
        self.levels = sorted(set(widths))
        self.ranks = np.array([self.levels.index(width) for width in widths])
        lowest = np.full(layout.size, len(self.levels), np.int8)  # rank of the narrowest width that has each value
        for rank, entry in ((rank, e) for rank in reversed(range(len(self.levels))) for e in self._floats()):
            values = lowest[entry.start : entry.stop].reshape(entry.shape)
            values[corners.index(entry.name, self.levels[rank])] = rank
        trained = np.arange(layout.size) < layout.parameter_size
        order = np.lexsort((lowest, ~trained))
        #: Column of each value of the full model, in the order of the layout.
        self.columns = np.empty(layout.size, np.int64 if layout.size >= 2**31 else np.int32)
        self.columns[order] = np.arange(layout.size, dtype=self.columns.dtype)
        lowest, trained = lowest[order], trained[order]
        changes = np.flatnonzero((np.diff(lowest) != 0) | (np.diff(trained.astype(np.int8)) != 0)) + 1
        runs = pairwise([0, *changes.tolist(), layout.size])
        self.bands = tuple(Band(slice(a, b), int(lowest[a]), bool(trained[a])) for a, b in runs)

    def _floats(self) -> list[Entry]:
        return [entry for entry in self.layout.entries if not entry.is_integer]

    def _places(self, entry: Entry, width: Width) -> Array:
        """Return the columns of an entry of a model of `width`, in the entry's shape."""
        columns = self.columns[entry.start : entry.stop].reshape(entry.shape)
        return columns[self.corners.index(entry.name, width)]

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Make every model the corner of `arrays`, a full model."""
        for slot, width in enumerate(self.widths):
            self.write(slot, self.corners.corner(arrays, width))

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model of the slot's width into row i; raise an UploadError if it is of another."""
        width = self.widths[i]
        spec = {name: (self.corners.shape(name, width), dtype) for name, (_, dtype) in self.layout.spec.items()}
        self.layout.check(arrays, spec)
        for entry in self.layout.entries:
            if entry.is_integer:
                self.integers[i, entry.start : entry.stop] = arrays[entry.name].reshape(-1)
            else:
                self.rows[i, self._places(entry, width)] = arrays[entry.name]

    def model(self, i: int) -> Arrays:
        """Return model i, of the slot's width, newly allocated."""
        return self.assembled(self.rows[i], self.widths[i], self.integers[i])

    def assembled(self, row: Array, width: Width, integers: NDArray[np.int64] | None = None) -> Arrays:
        """Return what `width` has of `row` (d,) as a model; its counters are `integers`, or means among its slots."""
        if integers is None:
            integers = self.mean_integers(self.of(self.levels.index(width)))
        model: Arrays = {}
        for entry in self.layout.entries:
            if entry.is_integer:
                model[entry.name] = integers[entry.start : entry.stop].reshape(entry.shape).astype(entry.dtype)
            else:
                model[entry.name] = np.asarray(row[self._places(entry, width)])
        return model

    def of(self, rank: int) -> NDArray[np.int64]:
        """Return the slots of the width of this rank."""
        return np.flatnonzero(self.ranks == rank)

    def mean_of(self, width: Width) -> Arrays:
        """Return the global model of `width`: each weight is the mean of the slots that have it."""
        rank = self.levels.index(width)
        return self.assembled(self._mean_at(rank, np.zeros(self.layout.size, self.layout.dtype)), width)

    def _mean_at(self, rank: int, row: Array) -> Array:
        """Write what the width of this rank has of the means to `row`; the rest of it stays."""
        for band in self.bands:
            if band.rank <= rank:
                slots = np.flatnonzero(self.ranks >= band.rank) if band.trained else self.of(rank)
                loops.mean(self.rows[:, band.columns], slots, row[band.columns])
        return row

    def mean_row(
        self, members: Sequence[int] | None = None, out: Array | None = None
    ) -> tuple[Array, NDArray[np.int64]]:
        """Return the mean of the widest width as one row (d,), `out` if given, and its counters (i,).

        Columns that no slot has are 0 in a new row, and stay as they are in `out`.
        """
        if members is not None:
            raise NotImplementedError("a pool of several widths has no mean of some of its slots")
        widest = len(self.levels) - 1
        row = np.zeros(self.layout.size, self.layout.dtype) if out is None else out
        return self._mean_at(widest, row), self.mean_integers(self.of(widest))

    def mean(self, members: Sequence[int] | None = None) -> Arrays:
        """Return the global model of the widest width."""
        row, integers = self.mean_row(members)
        return self.assembled(row, self.levels[-1], integers)

    def buffers(self) -> Array:
        """Return the mean float buffers (L, d - p) of the slots of each of the L widths, the narrowest first."""
        first = self.layout.parameter_size
        means = np.empty((len(self.levels), self.layout.size - first), self.layout.dtype)
        for rank, row in enumerate(means):
            loops.mean(self.rows[:, first:], self.of(rank), row)
        return means

    def follow(self, own: float, mean: Array, step: Array, push: float) -> None:
        """Set ``w_i = own v_i + (1 - own) mean + push step`` in the weights that each slot has.

        Buffers and counters are pulled to the means of the slots of one width; those of `mean` and `step` are not used.
        """
        import torch

        pull, factor, first = 1 - own, self.rows.dtype.type(push), self.layout.parameter_size
        for band in self.bands:
            shift = torch.from_numpy(step[band.columns] * factor)
            for slot in np.flatnonzero(self.ranks >= band.rank) if band.trained else ():
                part = torch.from_numpy(self.rows[slot, band.columns])
                part.lerp_(torch.from_numpy(mean[band.columns]), pull).add_(shift)
        for rank, target in enumerate(self.buffers()):
            slots = self.of(rank)
            for slot in slots:
                torch.from_numpy(self.rows[slot, first:]).lerp_(torch.from_numpy(target), pull)
            self.integers[slots] = pulled(self.integers[slots], own)

    def gram(self, members: Sequence[int] | None = None, columns: slice | None = None) -> Matrix:
        """Return the inner products of the members over the parameters that all slots have, the narrowest corner."""
        return loops.gram(self.rows, self.slots(members), self.bands[0].columns)

    def similarity(self, measure: Callable[[Matrix], Matrix]) -> Matrix:
        """Return the similarity (K, K) of all slots, of each pair on the corner that both have."""
        total, found = np.zeros((len(self), len(self))), np.zeros((len(self), len(self)))
        narrower = np.minimum(self.ranks[:, None], self.ranks[None, :])
        for rank in range(len(self.levels)):
            slots = np.flatnonzero(self.ranks >= rank)
            at = np.ix_(slots, slots)
            for band in self.bands:
                if band.trained and band.rank == rank:
                    total[at] += loops.gram(self.rows, slots, band.columns)
            found[at] = np.where(narrower[at] == rank, measure(total[at]), found[at])
        return found

    def mix(self, mixing: Mixing) -> None:
        """Replace the pool by ``M @ pool``, each value among the slots that have it."""
        own = among(mixing, self.ranks[:, None] == self.ranks[None, :])
        for band in self.bands:
            have = self.ranks >= band.rank
            part = among(mixing if band.trained else own, have[:, None] & have[None, :])
            if len(part.targets):
                loops.mix(self.rows[:, band.columns], part.targets, *part.padded())
        if len(own.targets):
            self._mix_integers(own)

    def resize(self, k: int) -> None:
        """Refuse another number of models: each slot has its width."""
        if k != len(self):
            raise ConfigError(f"a pool of {len(self)} models of several widths cannot have {k}: keep method.k.")

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the models of :meth:`state`, as many as the slots."""
        self.resize(len(state["rows"]))
        super().restore(state)


def among(mixing: Mixing, allowed: NDArray[np.bool_]) -> Mixing:
    """Return `mixing` without the sources that a slot may not use; the other weights are scaled up to sum to 1.

    `allowed` (K, K) says for each slot which sources it may use. A slot that is left without any keeps its model.
    """
    rows = []
    for i, row in enumerate(mixing.rows):
        kept = {j: weight for j, weight in row.items() if allowed[i, j]}
        if len(kept) < len(row):
            total = sum(kept.values())
            kept = {j: weight / total for j, weight in kept.items()} if len(kept) > 1 else dict.fromkeys(kept, 1.0)
        rows.append(kept or {i: 1.0})
    return Mixing(tuple(rows))
