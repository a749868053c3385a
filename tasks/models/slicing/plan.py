"""Which axis of which entry of a model belongs to which group of channels, and the corner that a size keeps.

A *group* is a set of n channels that several tensors share: the outputs of a convolution, the statistics of the
normalisation behind it, the inputs of the next layer, and all summands of a residual sum. A size of width p keeps the
first ``ceil(p n)`` channels of every group (HeteroFL, AdaptiveFL); inputs and classes are in no group and stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]
#: A width of a device or a model that differs by less is the same.
TOLERANCE = 1e-9


class Size(NamedTuple):
    """How much of the full model a slice keeps.

    Attributes
    ----------
    width : float
        p in (0, 1]: the share of the channels of a group that is cut.
    start : int
        Index of the first group that is cut, in the order of the forward pass; those before it stay whole (AdaptiveFL).
    """

    width: float
    start: int = 0

    @property
    def text(self) -> str:
        """The size as reports and metrics name it: ``0.4``, or ``0.4@2`` where the first groups stay whole."""
        return f"{self.width:g}" + (f"@{self.start}" if self.start and self.width < 1 else "")


FULL = Size(1.0)


class Segment(NamedTuple):
    """A run of positions along an axis.

    Attributes
    ----------
    group : int
        Index of the group whose channels lie here, in order; -1 for positions that are always kept.
    inner : int
        Consecutive positions of one channel (a flattened map of 5x5 pixels has 25); with group -1, all positions.
    """

    group: int
    inner: int


#: An axis is a sequence of segments (the gates of an LSTM are four of one group); None is an axis without channels.
Axis = tuple[Segment, ...] | None


class Group(NamedTuple):
    """Channels that are cut together: their number, and how many are kept or cut at once (1, or a norm's group)."""

    channels: int
    unit: int = 1

    def kept(self, width: float) -> int:
        """Return how many of the first channels a slice of `width` keeps."""
        return math.ceil(round(width * self.channels / self.unit, 9)) * self.unit


@dataclass(frozen=True)
class Plan:
    """How a model is sliced; :func:`tasks.models.slicing.plan_of` makes one from a network.

    Parameters
    ----------
    groups : tuple of Group
        In the order of the forward pass.
    entries : mapping of str to tuple of Axis
        Name in the ``state_dict`` -> its axes. Every entry that a slice cuts is here; others stay whole.
    shapes : mapping of str to tuple of int
        Shapes of those entries in the full model.
    exact : bool
        Whether a slice computes what the full model computes with the cut channels set to zero. False where a layer
        normalises over channels.
    resized : mapping of str to (Axis, Axis)
        Layers without weights that change the number of channels -> channels of their input and output.
    scaled : tuple of str
        Layers whose output HeteroFL's scaler divides: hidden convolutions and linear layers of torch whose weight
        nobody else uses. None in a network with batch normalisation.
    """

    groups: tuple[Group, ...]
    entries: Mapping[str, tuple[Axis, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    exact: bool = True
    resized: Mapping[str, tuple[Axis, Axis]] = field(default_factory=dict)
    scaled: tuple[str, ...] = ()

    @cached_property
    def _known(self) -> dict[tuple[str, Size], tuple[NDArray[np.intp], ...]]:
        return {}

    def kept(self, group: int, size: Size) -> int:
        """Return how many channels of a group `size` keeps."""
        found = self.groups[group]
        return found.channels if group < size.start else found.kept(size.width)

    def count(self, axis: Axis, size: Size, whole: int) -> int:
        """Return the length of an axis of `whole` positions in a slice."""
        if axis is None:
            return whole
        return sum(s.inner * (1 if s.group < 0 else self.kept(s.group, size)) for s in axis)

    def positions(self, axis: Axis, size: Size, whole: int) -> NDArray[np.intp]:
        """Return the positions of an axis of `whole` that a slice keeps, ascending."""
        if axis is None:
            return np.arange(whole)
        found, start = [], 0
        for segment in axis:
            channels, kept = (1, 1) if segment.group < 0 else (self.groups[segment.group].channels, 0)
            kept = kept or self.kept(segment.group, size)
            found.append(np.arange(start, start + kept * segment.inner))
            start += channels * segment.inner
        return np.concatenate(found)

    def cuts(self, name: str, size: Size) -> bool:
        """Return whether a slice has less of the entry `name` than the full model."""
        return name in self.entries and self.shape(name, size) != self.shapes[name]

    def shape(self, name: str, size: Size) -> tuple[int, ...]:
        """Return the shape of the entry `name`, one of ``entries``, in a slice."""
        pairs = zip(self.entries[name], self.shapes[name])
        return tuple(self.count(axis, size, whole) for axis, whole in pairs)

    def index(self, name: str, size: Size) -> tuple[NDArray[np.intp], ...]:
        """Return what selects a slice's part of the entry `name`: ``array[plan.index(name, size)]``."""
        if (name, size) not in self._known:
            pairs = zip(self.entries[name], self.shapes[name])
            self._known[name, size] = np.ix_(*(self.positions(axis, size, whole) for axis, whole in pairs))
        return self._known[name, size]

    def corner(self, arrays: Mapping[str, Array], size: Size) -> Arrays:
        """Return the slice of a full model; entries that the slice has whole are the same arrays, not copies."""
        return {n: np.array(a[self.index(n, size)]) if self.cuts(n, size) else a for n, a in arrays.items()}

    def masks(self, arrays: Mapping[str, Array], size: Size) -> dict[str, NDArray[np.bool_]]:
        """Return, for each entry of the full model `arrays`, which of its elements a slice has."""
        found = {}
        for name, array in arrays.items():
            mask = np.full(array.shape, not self.cuts(name, size))
            if self.cuts(name, size):
                mask[self.index(name, size)] = True
            found[name] = mask
        return found

    def within(self, name: str, narrow: Size, size: Size) -> list[NDArray[np.intp]]:
        """Return where a slice of `narrow` lies in the entry `name` of a slice of `size`: positions on each axis."""
        return [
            np.searchsorted(self.positions(axis, size, whole), self.positions(axis, narrow, whole))
            for axis, whole in zip(self.entries[name], self.shapes[name])
        ]

    def share(self, size: Size, shapes: Mapping[str, Sequence[int]]) -> float:
        """Return the share of the values of a model with entries of `shapes` that a slice has."""
        whole = {name: math.prod(shape) for name, shape in shapes.items()}
        part = sum(math.prod(self.shape(n, size)) if n in self.entries else count for n, count in whole.items())
        return part / sum(whole.values())

    def plain(self) -> dict[str, Any]:
        """Return what a server without the network needs of the plan, as JSON values."""
        entries = {n: [None if a is None else [list(s) for s in a] for a in axes] for n, axes in self.entries.items()}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"groups": [list(group) for group in self.groups], "entries": entries, "shapes": shapes}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan that :meth:`plain` described; ``scaled`` may stand beside what that returned."""
        entries = {
            name: tuple(None if axis is None else tuple(Segment(*s) for s in axis) for axis in axes)
            for name, axes in values["entries"].items()
        }
        shapes = {name: tuple(shape) for name, shape in values["shapes"].items()}
        scaled = tuple(values.get("scaled", ()))
        return cls(tuple(Group(*group) for group in values["groups"]), entries, shapes, scaled=scaled)
