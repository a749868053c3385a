"""Bands of an update: the values of a slice that exactly the same sizes have, each judged among those that train it.

A wide device alone could put the whole length that the defence leaves it into the values that few others have, where
the means are of these few: honest ones change them by much less. So once the whole update has been shortened, a slice
is shortened band by band too, in those bands that other uploads of the exchange lack. The whole comes first: else an
honest wide update that is long would be shortened in the rare band twice, and a false one that is only there once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from operator import and_
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcross.strategies.defence.rules import BLOCK, in_both, rounded, usual
from fedcross.strategies.pool.layout import Array, Arrays
from fedcross.tasks.models.slicing.plan import Axis, Plan, Size

if TYPE_CHECKING:
    from fedcross.strategies.wire.protocol import Upload

#: Where some values of an array lie, one array of positions per axis.
Index = tuple[NDArray[np.intp], ...]


class Bands:
    """The bands of the slices that a method trains.

    A band's number has bit i set if size i has its values.

    Parameters
    ----------
    plan : Plan
        How the model is sliced.
    sizes : sequence of Size
        All sizes that the method trains; they need not lie within each other.
    """

    def __init__(self, plan: Plan, sizes: Sequence[Size]) -> None:
        self._plan, self._sizes = plan, sizes
        self._known: dict[tuple[Axis, int, Size], list[tuple[int, NDArray[np.intp]]]] = {}

    def lengths(
        self, upload: Mapping[str, Array], model: Mapping[str, Array], parameters: Collection[str]
    ) -> dict[int, float]:
        """Return band -> Euclidean norm of ``upload - model`` in it, over `parameters`, summed in float64."""
        size, squares = self._size(model), dict[int, float]()
        for name in in_both(upload, model, parameters):
            for band, index in self._parts(name, model[name].shape, size):
                change = np.subtract(upload[name][index], model[name][index], dtype=np.float64).reshape(-1)
                squares[band] = squares.get(band, 0.0) + float(change @ change)
        return {band: math.sqrt(square) for band, square in squares.items()}

    def scaled(
        self,
        upload: Mapping[str, Array],
        model: Mapping[str, Array],
        parameters: Collection[str],
        factors: Mapping[int, float],
    ) -> Arrays:
        """Return `upload` with its update of `parameters` times a factor in each band of `factors` (new arrays)."""
        size, scaled = self._size(model), dict(upload)
        for name in in_both(upload, model, parameters):
            result = np.array(upload[name])  # one of no axes stays an array
            for band, index in self._parts(name, result.shape, size):
                if band in factors:
                    base = model[name][index].astype(np.float64)
                    result[index] = rounded(result.dtype, base + factors[band] * (result[index] - base))
            scaled[name] = result
        return scaled

    def shortened(
        self,
        uploads: Sequence[Upload],
        sent: Sequence[Mapping[str, Array]],
        parameters: Collection[str],
        most: float,
        known: Mapping[int, float],
    ) -> tuple[list[Upload], dict[int, float]]:
        """Shorten each band that some uploads lack to `most` times what is :func:`usual` in it.

        What all of them have is bounded by the whole length alone.

        Parameters
        ----------
        uploads : sequence of Upload
            Those of one exchange; their arrays are never written to.
        sent : sequence of mapping
            The slice that the server sent for each upload, in the same order.
        parameters : collection of str
            Names of the trained entries.
        most : float
            A multiple.
        known : mapping of int to float
            Band -> the length that was usual before, where that is known.

        Returns
        -------
        tuple
            The uploads, those that have changed as new ones; and band -> its median length, where enough uploads have
            it to know that.
        """
        lengths = [self.lengths(upload.arrays, model, parameters) for upload, model in zip(uploads, sent, strict=True)]
        limits, found = {}, {}
        for band in sorted(set().union(*lengths)):
            having = [own[band] for own in lengths if band in own]
            limit, median = usual(having, known.get(band, 0.0))
            limits[band] = most * limit if len(having) < len(uploads) else math.inf
            if median is not None and median < math.inf:
                found[band] = median
        kept = list(uploads)
        for place, (upload, model, own) in enumerate(zip(uploads, sent, lengths)):
            # The whole of what is infinite is judged next, and is lost.
            factors = {b: limits[b] / length for b, length in own.items() if limits[b] < length < math.inf}
            if factors:
                kept[place] = replace(upload, arrays=self.scaled(upload.arrays, model, parameters, factors))
        return kept, found

    def _size(self, model: Mapping[str, Array]) -> Size:
        """Return the size of a model, by its shapes."""
        cut = [name for name in self._plan.entries if name in model]
        return next(s for s in self._sizes if all(self._plan.shape(name, s) == model[name].shape for name in cut))

    def _parts(self, name: str, shape: tuple[int, ...], size: Size) -> Iterator[tuple[int, Index | tuple[()]]]:
        """Yield the bands of an entry of a slice, and where their values lie in it, about :data:`BLOCK` at a time."""
        everybody = (1 << len(self._sizes)) - 1
        axes = self._plan.entries.get(name, (None,) * len(shape))
        runs = [self._runs(axis, whole, size) for axis, whole in zip(axes, self._plan.shapes.get(name, shape))]
        for run in product(*runs):
            band = reduce(and_, (own for own, _ in run), everybody)
            if not run:
                yield band, ()
                continue
            first, *others = (positions for _, positions in run)
            pieces = math.ceil(len(first) * math.prod(map(len, others)) / BLOCK)
            for rows in np.array_split(first, min(pieces, len(first))):
                yield band, np.ix_(rows, *others)

    def _runs(self, axis: Axis, whole: int, size: Size) -> list[tuple[int, NDArray[np.intp]]]:
        """Return for an axis of `whole` positions which sizes have which of its positions in a slice."""
        if (axis, whole, size) not in self._known:
            having = np.zeros(whole, np.int64)
            for bit, one in enumerate(self._sizes):
                having[self._plan.positions(axis, one, whole)] |= 1 << bit
            own = having[self._plan.positions(axis, size, whole)]
            runs = [(int(sizes), np.flatnonzero(own == sizes)) for sizes in np.unique(own)]
            self._known[axis, whole, size] = runs
        return self._known[axis, whole, size]
