"""A pool whose models have several widths: full rows, of which a narrow model uses the columns of its corner.

The columns are ordered so that the corner of every size is a few whole runs of columns, *bands*: a band holds the
values that exactly the same sizes have. Mixing, means and similarities then are those of :mod:`strategies.pool.pool`,
band by band, among the slots that have the band. Columns beyond a slot's corner are zero and nobody reads them.

Float buffers and counters (the statistics of batch normalisation) belong to a width: the activations of a narrow model
are not those of a wide one. They mix and average among slots of one size only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, UploadError
from fedcross.strategies.pool import blocks
from fedcross.strategies.pool.layout import Array, Arrays, Entry, Layout
from fedcross.strategies.pool.mixing import Mixing
from fedcross.strategies.pool.pool import Pool, Storage, pulled
from fedcross.tasks.models.slicing.plan import Plan, Size

Gram = NDArray[np.float64]


class Band(NamedTuple):
    """Columns ``start:stop`` of a row, which sizes of `rank` and above have (0 is the narrowest)."""

    start: int
    stop: int
    rank: int
    trained: bool

    @property
    def columns(self) -> slice:
        """The columns."""
        return slice(self.start, self.stop)


class SlicedPool(Pool):
    """K models, each a slice of one full model.

    Parameters
    ----------
    layout : Layout
        Layout of the full model.
    sizes : sequence of Size
        Size of each slot; all start at the first group, so that a narrower one is part of a wider one.
    plan : Plan
        How the model is sliced.
    storage : Storage, optional
        When and where to use a file instead of memory.
    """

    def __init__(self, layout: Layout, sizes: Sequence[Size], plan: Plan, storage: Storage | None = None) -> None:
        super().__init__(layout, len(sizes), storage)
        self.rows[...] = 0
        self.plan, self.sizes = plan, tuple(sizes)
        #: The sizes in the pool, the narrowest first.
        self.levels = sorted(set(sizes))
        #: Rank of each slot's size among them.
        self.ranks = np.array([self.levels.index(size) for size in sizes])
        lowest = self._lowest_ranks()
        trained = np.arange(layout.size) < layout.parameter_size
        order = np.lexsort((lowest, ~trained))
        #: Column of each value of the full model, in the order of the layout.
        self.columns = np.empty(layout.size, _column_type(layout.size))
        self.columns[order] = np.arange(layout.size, dtype=self.columns.dtype)
        self.bands = _bands(lowest[order], trained[order])

    def _lowest_ranks(self) -> NDArray[np.int8]:
        """Return, for each float value of the full model, the rank of the narrowest size that has it.

        Values that no slot has get the rank behind the widest one.
        """
        lowest = np.full(self.layout.size, len(self.levels), np.int8)
        for rank in reversed(range(len(self.levels))):
            for entry in self._floats():
                values = lowest[entry.start : entry.stop].reshape(entry.shape)
                values[self._index(entry, self.levels[rank])] = rank
        return lowest

    def _floats(self) -> list[Entry]:
        return [entry for entry in self.layout.entries if not entry.is_integer]

    def _index(self, entry: Entry, size: Size) -> tuple[NDArray[np.intp], ...] | tuple[()]:
        return self.plan.index(entry.name, size) if self.plan.cuts(entry.name, size) else ()

    def _places(self, entry: Entry, size: Size) -> Array:
        """Return the columns of an entry of a slice, in the entry's shape."""
        return self.columns[entry.start : entry.stop].reshape(entry.shape)[self._index(entry, size)]

    # ---- models in and out ------------------------------------------------------------------------------------

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Make every model the slice of `arrays`, a full model."""
        for slot, size in enumerate(self.sizes):
            self.write(slot, self.plan.corner(arrays, size))

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model of the slot's size into row i.

        Raises
        ------
        UploadError
            If it is not of that size; the row is then unchanged.
        """
        self._check(arrays, self.sizes[i])
        for entry in self.layout.entries:
            if entry.is_integer:
                self.integers[i, entry.start : entry.stop] = arrays[entry.name].reshape(-1)
            else:
                self.rows[i, self._places(entry, self.sizes[i])] = arrays[entry.name]

    def _check(self, arrays: Mapping[str, Array], size: Size) -> None:
        if set(arrays) != set(self.layout.names):
            raise UploadError("wrong_names", f"{sorted(set(arrays) ^ set(self.layout.names))}")
        for name, (shape, dtype) in self.layout.spec.items():
            wanted = self.plan.shape(name, size) if name in self.plan.entries else shape
            if arrays[name].shape != wanted:
                raise UploadError("wrong_shape", f"{name} has shape {arrays[name].shape}, expected {wanted}")
            if str(arrays[name].dtype) != dtype:
                raise UploadError("wrong_dtype", f"{name} has dtype {arrays[name].dtype}, expected {dtype}")

    def replace(self, slots: Sequence[int], members: Sequence[int]) -> None:
        """Make each of `slots` the uniform mean of those `members` that have its size.

        Of one alone it would be a copy, perhaps a hostile one's. Then each trained value is the mean of all `members`
        that have it, if these are several; the rest, and what is not trained, stays as it is.
        """
        for slot in slots:
            rank = self.ranks[slot]
            own = [member for member in members if self.ranks[member] == rank]
            if len(own) > 1:
                super().replace([slot], own)
                continue
            for band in (one for one in self.bands if one.trained and one.rank <= rank):
                having = [member for member in members if self.ranks[member] >= band.rank]
                if len(having) > 1:
                    blocks.mean(self.rows[:, band.columns], np.array(having), self.rows[slot, band.columns])

    def model(self, i: int) -> Arrays:
        """Return model i, of the slot's size, as arrays of its own."""
        return self.assembled(self.rows[i], self.sizes[i], self.integers[i])

    def assembled(self, row: Array, size: Size, integers: NDArray[np.int64] | None = None) -> Arrays:
        """Return the part of `row` (d,) that `size` has as a model, newly allocated.

        Its counters are `integers` (i,), or the means of those of the slots of this size.
        """
        if integers is None:
            integers = self.mean_integers(self._of(self.levels.index(size)))
        model: Arrays = {}
        for entry in self.layout.entries:
            if entry.is_integer:
                part = integers[entry.start : entry.stop].reshape(entry.shape)
                model[entry.name] = part.astype(entry.dtype)
            else:
                model[entry.name] = row[self._places(entry, size)]
        return model

    # ---- what mixes and averages -------------------------------------------------------------------------------

    def having(self, band: Band) -> NDArray[np.int64]:
        """Return the slots that have the values of `band`."""
        return np.flatnonzero(self.ranks >= band.rank)

    def mean_of(self, size: Size) -> Arrays:
        """Return the global model of `size`, one of the pool's: each value is the mean of the slots that have it.

        Buffers and counters are the mean of the slots of this size.
        """
        rank = self.levels.index(size)
        return self.assembled(self._mean_at(rank, np.zeros(self.layout.size, self.layout.dtype)), size)

    def _of(self, rank: int) -> NDArray[np.int64]:
        """Return the slots of the size of this rank."""
        return np.flatnonzero(self.ranks == rank)

    def _mean_at(self, rank: int, row: Array) -> Array:
        """Write what the size of this rank has of the means to `row`; the rest of it stays."""
        own = self._of(rank)
        for band in self.bands:
            if band.rank <= rank:
                slots = self.having(band) if band.trained else own
                blocks.mean(self.rows[:, band.columns], slots, row[band.columns])
        return row

    def mean_row(
        self, members: Sequence[int] | None = None, out: Array | None = None
    ) -> tuple[Array, NDArray[np.int64]]:
        """Return the mean of the widest size as one row (d,), `out` if given, and its counters (i,).

        Columns that no slot has are 0 in a new row, and stay as they are in `out`.
        """
        if members is not None:
            raise NotImplementedError("a pool of several widths has no mean of some of its slots")
        widest = len(self.levels) - 1
        row = np.zeros(self.layout.size, self.layout.dtype) if out is None else out
        return self._mean_at(widest, row), self.mean_integers(self._of(widest))

    def buffers(self) -> Array:
        """Return the mean float buffers (L, d - p) of the slots of each of the L sizes, the narrowest first."""
        first = self.layout.parameter_size
        means = np.empty((len(self.levels), self.layout.size - first), self.layout.dtype)
        for rank, row in enumerate(means):
            blocks.mean(self.rows[:, first:], self._of(rank), row)
        return means

    def follow(self, own: float, mean: Array, step: Array, push: float) -> None:
        """Set ``w_i = own v_i + (1 - own) mean + push step`` for all slots, each in the values that it has.

        Buffers and counters are pulled to the means of the slots of one size. With one size this is
        :func:`strategies.pool.passes.follow`, to the bit.

        Parameters
        ----------
        own : float
            Share of a model's own values, 0 to 1.
        mean, step : float array (d,)
            Rows like those of the pool; their buffers are not used.
        push : float
            Share of `step`, rounded to the rows' dtype.
        """
        import torch

        pull, factor = 1 - own, self.rows.dtype.type(push)
        for band in self.bands:
            if band.trained:
                shift = torch.from_numpy(step[band.columns] * factor)
                for slot in self.having(band):
                    part = torch.from_numpy(self.rows[slot, band.columns])
                    part.lerp_(torch.from_numpy(mean[band.columns]), pull).add_(shift)
        first = self.layout.parameter_size
        for rank, target in enumerate(self.buffers()):
            slots = self._of(rank)
            for slot in slots:
                torch.from_numpy(self.rows[slot, first:]).lerp_(torch.from_numpy(target), pull)
            self.integers[slots] = pulled(self.integers[slots], own)

    def mean(self, members: Sequence[int] | None = None) -> Arrays:
        """Return the global model of the widest size."""
        if members is not None:
            raise NotImplementedError("a pool of several widths has no mean of some of its slots")
        return self.mean_of(self.levels[-1])

    def gram(self, members: Sequence[int] | None = None, columns: slice | None = None) -> Gram:
        """Return the inner products of the members over the parameters that all slots have, the narrowest corner."""
        return blocks.gram(self.rows, self._slots(members), self.bands[0].columns)

    def similarity(self, measure: Callable[[Gram], Gram]) -> Gram:
        """Return the similarity (K, K) of all slots, of each pair on the corner that both have."""
        k = len(self)
        total, found = np.zeros((k, k)), np.zeros((k, k))
        narrower = np.minimum(self.ranks[:, None], self.ranks[None, :])
        for rank in range(len(self.levels)):
            slots = np.flatnonzero(self.ranks >= rank)
            at = np.ix_(slots, slots)
            for band in self.bands:
                if band.trained and band.rank == rank:
                    total[at] += blocks.gram(self.rows, slots, band.columns)
            found[at] = np.where(narrower[at] == rank, measure(total[at]), found[at])
        return found

    def mix_with_gram(self, mixing: Mixing, columns: slice | None = None) -> Gram:
        """Do :meth:`mix` and return :meth:`gram` of all slots before mixing."""
        gram = self.gram(columns=columns)
        self.mix(mixing)
        return gram

    def mix(self, mixing: Mixing) -> None:
        """Replace the pool by ``M @ pool``, each value among the slots that have it.

        A slot that takes a share of a narrower model keeps the rest of its own: there, the weights of the models that
        have the value are scaled up to sum to 1.
        """
        if len(mixing.rows) != len(self):
            raise ValueError(f"a mixing of {len(mixing.rows)} slots does not fit a pool of {len(self)}")
        if len(self.levels) == 1:
            super().mix(mixing)
            return
        own = among(mixing, self.ranks[:, None] == self.ranks[None, :])
        for band in self.bands:
            have = self.ranks >= band.rank
            part = among(mixing, have[:, None] & have[None, :]) if band.trained else among(own, have[:, None] & have)
            if len(part.targets):
                blocks.mix(self.rows[:, band.columns], part.targets, *part.padded())
        if self.integers.size and len(own.targets):
            self._mix_integers(own.dense()[own.targets], own.targets)

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the models of :meth:`state`.

        Raises
        ------
        ConfigError
            If they are not as many as the slots, each of which has its width.
        """
        if (before := len(state["rows"])) != len(self):
            raise ConfigError(
                f"the run in that folder has a pool of {before} models of several widths, now it would have "
                f"{len(self)}. Their number cannot change: leave method.k, or without it clients_per_round, as it was."
            )
        super().restore(state)

    def resize(self, k: int) -> None:
        """Refuse another number of models: each slot has its width."""
        if k != len(self):
            raise ValueError(f"a pool of {len(self)} models of several widths cannot have {k}")


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


def _column_type(size: int) -> type[np.int32 | np.int64]:
    """Return the smaller of two types that can number `size` columns."""
    return np.int32 if size < 2**31 else np.int64


def _bands(ranks: NDArray[np.int8], trained: NDArray[np.bool_]) -> tuple[Band, ...]:
    """Return the runs of columns of one rank; parameters and buffers are apart."""
    changes = np.flatnonzero((np.diff(ranks) != 0) | (np.diff(trained.astype(np.int8)) != 0)) + 1
    edges = [0, *changes.tolist(), len(ranks)]
    return tuple(Band(start, stop, int(ranks[start]), bool(trained[start])) for start, stop in pairwise(edges))
