"""Models of several widths, each the leading corner of a full one: how corners are cut, mixed and averaged.

Every weight is mixed or averaged among the models that have it; a model keeps what the others lack. Float buffers and
counters (the statistics of batch normalisation) belong to a width: they mix and average among models of one width only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.method import Evaluation, Method, Round, Start, Task, Upload
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.mixing import Matrix, Mixing
from fedcross.strategies.pool.pool import Array, Arrays, Entry, Layout, Pool, Storage, mixed_integers, pulled
from fedcross.tasks.models.width import Corners, Width


class Band(NamedTuple):
    """Columns that the widths of `rank` and above have (0 is the narrowest)."""

    columns: slice
    rank: int
    trained: bool


class WidthPool(Pool):
    """K models of several `widths`, one each: full rows, of which a narrow model uses the columns of its corner.

    The columns are ordered so that every corner is a few whole runs of columns, *bands*. Columns beyond a slot's
    corner are zero and nobody reads them. `layout` is that of the full model.
    """

    def __init__(
        self, layout: Layout, widths: Sequence[Width], corners: Corners, storage: Storage | None = None
    ) -> None:
        super().__init__(layout, len(widths), storage)
        self.rows[...] = 0
        self.corners, self.widths = corners, tuple(widths)
        self.levels = sorted(set(widths))  #: the widths in the pool, the narrowest first
        self.ranks = np.array([self.levels.index(width) for width in widths])  #: of each slot's width among them
        lowest = np.full(layout.size, len(self.levels), np.int8)  # rank of the narrowest width that has each value
        for rank, width in reversed(list(enumerate(self.levels))):
            for entry in layout.entries:
                if not entry.is_integer:
                    lowest[entry.start : entry.stop].reshape(entry.shape)[corners.index(entry.name, width)] = rank
        trained = np.arange(layout.size) < layout.parameter_size
        order = np.lexsort((lowest, ~trained))
        self.columns = np.empty(layout.size, np.int64)  #: of each value of the full model, in the order of the layout
        self.columns[order] = np.arange(layout.size)
        lowest, trained = lowest[order], trained[order]
        changes = np.flatnonzero((np.diff(lowest) != 0) | (trained[1:] != trained[:-1])) + 1
        runs = pairwise([0, *changes.tolist(), layout.size])
        self.bands = tuple(Band(slice(a, b), int(lowest[a]), bool(trained[a])) for a, b in runs)

    def _places(self, entry: Entry, width: Width) -> Array:
        """Return the columns of an entry of a model of `width`, in the entry's shape."""
        return self.columns[entry.start : entry.stop].reshape(entry.shape)[self.corners.index(entry.name, width)]

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Make every model the corner of `arrays`, a full model."""
        for slot, width in enumerate(self.widths):
            self.write(slot, self.corners.corner(arrays, width))

    def write(self, i: int, arrays: Mapping[str, Array]) -> None:
        """Copy a model of the slot's width into row i."""
        for entry in self.layout.entries:
            if entry.is_integer:
                self.integers[i, entry.start : entry.stop] = arrays[entry.name].reshape(-1)
            else:
                self.rows[i, self._places(entry, self.widths[i])] = arrays[entry.name]

    def model(self, i: int) -> Arrays:
        """Return model i, of the slot's width, newly allocated."""
        return self.assembled(self.rows[i], self.widths[i], self.integers[i])

    def assembled(self, row: Array, width: Width, integers: NDArray[np.int64] | None = None) -> Arrays:
        """Return what `width` has of `row` (d,) as a model; its counters are `integers`, or means among its slots."""
        whole = self.mean_integers(self.of(self.levels.index(width))) if integers is None else integers.copy()
        floats = {e.name: np.asarray(row[self._places(e, width)]) for e in self.layout.entries if not e.is_integer}
        return self.layout.views(row, whole) | floats

    def of(self, rank: int) -> NDArray[np.int64]:
        """Return the slots of the width of this rank."""
        return np.flatnonzero(self.ranks == rank)

    def mean_of(self, width: Width) -> Arrays:
        """Return the global model of `width`: each weight is the mean of the slots that have it."""
        return self.assembled(self._mean_at(self.levels.index(width)), width)

    def _mean_at(self, rank: int) -> Array:
        """Return the means that the width of this rank has, as a row (d,), 0 elsewhere."""
        row = np.zeros(self.layout.size, self.layout.dtype)
        for band in self.bands:
            if band.rank <= rank:
                slots = np.flatnonzero(self.ranks >= band.rank) if band.trained else self.of(rank)
                loops.mean(self.rows[:, band.columns], slots, row[band.columns])
        return row

    def mean_row(self, members: Sequence[int] | None = None) -> tuple[Array, NDArray[np.int64]]:
        """Return the mean of the widest width, over all slots, as one row (d,), and its counters (i,)."""
        widest = len(self.levels) - 1
        return self._mean_at(widest), self.mean_integers(self.of(widest))

    def mean(self, members: Sequence[int] | None = None) -> Arrays:
        """Return the global model of the widest width, over all slots."""
        return self.mean_of(self.levels[-1])

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
        return super().gram(members, self.bands[0].columns)

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
        self.integers[own.targets] = mixed_integers(self.integers, own.dense()[own.targets])

    def resize(self, k: int) -> None:
        """Refuse another number of models, as each slot has its width."""
        if k != len(self):
            raise ConfigError(f"a pool of {len(self)} models of several widths cannot have {k}: keep method.k.")


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


# ---- one global model, of which every client trains the width that its device can hold -----------------------------


class WidthModel:
    """One global model, and the statistics and counters of each of its `widths`, the widest first."""

    def __init__(self, start: Start, widths: Sequence[Width]) -> None:
        if start.corners is None:
            raise ConfigError("method.widths needs the network; use the command fedcross.")
        self.corners, self.widths, self.names = start.corners, list(widths), tuple(start.arrays)
        self.weights = {name: start.arrays[name].copy() for name in start.parameters}
        rest = {name: array.copy() for name, array in start.arrays.items() if name not in self.weights}
        self.statistics = {width: self.corners.corner(rest, width) for width in widths}

    def at(self, width: Width) -> Arrays:
        """Return the model of `width`, in the order of the ``state_dict``."""
        values = {**self.corners.corner(self.weights, width), **self.statistics[width]}
        return {name: values[name] for name in self.names}

    def merge(
        self,
        uploads: Sequence[Upload],
        shares: Sequence[float],
        rows: Callable[[str, Upload], Array | None] | None = None,
    ) -> None:
        """Set each weight to the mean, weighted by `shares`, of the uploads that have it; statistics by width.

        ``rows(name, upload)`` may say which rows of an entry count, bool (rows,); None is all. Sums are float64.
        """
        for name, old in self.weights.items() if uploads else ():
            total, weights = np.zeros(old.shape), np.zeros(old.shape)
            for upload, share in zip(uploads, shares):
                part, values = self.corners.index(name, upload.task.width), upload.arrays[name].astype(np.float64)
                counted = rows(name, upload) if rows else None
                weigh = share if counted is None else share * counted.reshape(-1, *(1,) * (values.ndim - 1))
                total[part] += weigh * values
                weights[part] += weigh
            mean = np.divide(total, weights, out=old.astype(np.float64), where=weights > 0)
            self.weights[name] = mean.astype(old.dtype)
        for width, known in self.statistics.items():
            own = [(upload, share) for upload, share in zip(uploads, shares) if upload.task.width == width]
            if own and known:
                parts = [{name: upload.arrays[name] for name in known} for upload, _ in own]
                self.statistics[width] = weighted_mean(parts, [share for _, share in own])

    def state(self) -> dict[str, Array]:
        """Return the weights and every width's statistics as arrays, for a checkpoint."""
        parts = {"weights": self.weights} | {width.text: own for width, own in self.statistics.items()}
        return {f"{part}:{name}": array for part, arrays in parts.items() for name, array in arrays.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load what :meth:`state` returned."""
        self.weights = {name: state[f"weights:{name}"] for name in self.weights}
        for width, own in self.statistics.items():
            self.statistics[width] = {name: state[f"{width.text}:{name}"] for name in own}


@dataclass
class WidthState:
    """The model of all widths, and how many clients of this round got none."""

    model: WidthModel
    idle: int = 0


P = TypeVar("P", bound=Settings, default=Any)
S = TypeVar("S", bound=WidthState, default=Any)


class OneModelOfWidths(Method[P, S]):
    """Base of methods that define :meth:`widths` and, for each client of a round, :meth:`width_for`."""

    State: ClassVar[type[WidthState]] = WidthState

    def init(self, start: Start) -> S:
        """Return the initial model at every width."""
        return cast("S", self.State(WidthModel(start, self.widths(start.corners))))

    @abstractmethod
    def width_for(self, state: S, round: Round, slot: int) -> Width | None:
        """Return the width that ``round.clients[slot]`` gets; None if its device can hold none."""

    def dispatch(self, state: S, round: Round) -> list[Task]:
        """Send every client the width that its device can hold; a device that can hold none is not asked."""
        found = {slot: self.width_for(state, round, slot) for slot in range(len(round.clients))}
        dealt = {slot: width for slot, width in found.items() if width is not None}
        state.idle = len(found) - len(dealt)
        sent = {width: (state.model.at(width), f"size{i}") for i, width in enumerate(state.model.widths)}
        return [Task(round.clients[i], i, sent[w][0], width=w, stream=sent[w][1]) for i, w in dealt.items()]

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the mean of the uploads, each weight over those that have it."""
        state.model.merge(uploads, [float(upload.num_examples) for upload in uploads])
        return {"clients_without_a_model": float(state.idle)} if state.idle else {}

    def evaluation(self, state: S) -> Evaluation:
        """Return the global model of every width."""
        return Evaluation([], {width: state.model.at(width) for width in state.model.widths})

    def global_model(self, state: S) -> Arrays:
        """Return the global model of the largest width."""
        return state.model.at(state.model.widths[0])
