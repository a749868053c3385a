"""The labels of tensors while a network is traced: groups of channels along their axes, and how they are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedcross.core.errors import ConfigError
from fedcross.core.paths import page
from fedcross.tasks.models.slicing.plan import Axis, Segment

#: One axis each; a tensor without channels has a label of Nones.
Label = tuple[Axis, ...]


class UnsliceableError(Exception):
    """An operation that the tracer cannot follow; the text says which and what to do."""


@dataclass
class Groups:
    """Groups of channels as they are found; joined ones have one root.

    Attributes
    ----------
    sizes : list of int
        Number of channels of each.
    """

    sizes: list[int] = field(default_factory=list)
    _parent: list[int] = field(default_factory=list)
    _unit: list[int] = field(default_factory=list)
    _whole: set[int] = field(default_factory=set)

    def new(self, channels: int) -> Axis:
        """Return an axis of a new group."""
        self.sizes.append(channels)
        self._parent.append(len(self._parent))
        self._unit.append(1)
        return (Segment(len(self.sizes) - 1, 1),)

    def root(self, group: int) -> int:
        """Return the group that `group` was joined to."""
        while self._parent[group] != group:
            group = self._parent[group]
        return group

    def length(self, axis: Axis) -> int:
        """Return the number of positions of a labelled axis."""
        return sum(s.inner * (1 if s.group < 0 else self.sizes[s.group]) for s in axis or ())

    def unit(self, group: int, unit: int) -> None:
        """Keep or cut the channels of `group` in steps of `unit`."""
        root = self.root(group)
        self._unit[root] = math.lcm(self._unit[root], unit)

    def keep_whole(self, axis: Axis) -> None:
        """Never cut the channels of `axis`."""
        self._whole |= {self.root(s.group) for s in axis or () if s.group >= 0}

    def join(self, first: Axis, second: Axis) -> Axis:
        """Say that two axes hold the same channels, and return their label; one without channels stays whole."""
        if first is None or second is None:
            self.keep_whole(first or second)
            return first or second
        if len(first) != len(second):
            raise UnsliceableError("it combines channels that do not line up")
        for one, other in zip(first, second):
            self._join(one, other)
        return first

    def _join(self, one: Segment, other: Segment) -> None:
        if one.group < 0 and other.group < 0 and one.inner == other.inner:
            return
        if one.inner != other.inner or min(one.group, other.group) < 0:
            raise UnsliceableError("it combines channels that do not line up")
        a, b = sorted((self.root(one.group), self.root(other.group)))
        if self.sizes[a] != self.sizes[b]:
            raise UnsliceableError(f"it combines {self.sizes[a]} channels with {self.sizes[b]}")
        self._parent[b] = a
        self.unit(a, self._unit[b])
        if b in self._whole:
            self._whole.add(a)

    def cut(self) -> dict[int, tuple[int, int]]:
        """Return the roots of the groups that may be cut, in their order: root -> (channels, unit)."""
        whole = {self.root(group) for group in self._whole}
        roots = [g for g in range(len(self.sizes)) if self.root(g) == g and g not in whole]
        return {g: (self.sizes[g], self._unit[g]) for g in roots}


def reshaped(label: Label, old: Sequence[int], new: Sequence[int]) -> Label:
    """Return the label of a tensor of shape `old` after a reshape to `new`.

    Raises
    ------
    UnsliceableError
        If the channels would be divided between axes, or lie inside of others.
    """
    found: list[Axis] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i + 1, j + 1
        left, right = math.prod(old[i:a]), math.prod(new[j:b])
        while left != right:
            if left < right:
                a, left = a + 1, left * old[a]
            else:
                b, right = b + 1, right * new[b]
        found += _block(label[i:a], old[i:a], new[j:b])
        i, j = a, b
    return tuple(found[: len(new)])


def _block(label: Label, old: Sequence[int], new: Sequence[int]) -> list[Axis]:
    """Return the axes of one group of axes that a reshape turns into others of the same product."""
    if not any(label):
        return [None] * len(new)
    wide = [axis for axis, size in zip(label, old) if size != 1 or axis]
    sizes = [size for axis, size in zip(label, old) if size != 1 or axis]
    long = [size for size in new if size != 1]
    if len(long) > 1 or (not long and len(new) > 1):
        if sizes == long:
            rest = iter(wide)
            return [None if size == 1 else next(rest) for size in new]
        raise UnsliceableError("it divides one axis of channels into several")
    axis = wide[-1]
    for outer, size in zip(reversed(wide[:-1]), reversed(sizes[:-1])):
        axis = _around(outer, size, axis, sizes[-1])
        sizes[-1] *= size
    placed = [axis if size != 1 else None for size in new]
    return placed if long else [axis]


def _around(outer: Axis, size: int, inner: Axis, length: int) -> Axis:
    """Return the label of an axis of `size` around one of `length`, flattened."""
    if outer is None:
        return None if inner is None else inner * size
    if inner is not None:
        raise UnsliceableError("it flattens two axes of channels into one")
    return tuple(Segment(s.group, s.inner * length) for s in outer)


def called(network: object) -> str:
    """Return what a user calls `network`: by its class, unless that is one of this project's, which nobody named."""
    kind = type(network)
    return "this model" if kind.__module__.startswith("fedcross.") else f"model {kind.__name__}"


def refusal(model: str, place: str, operation: str, why: str) -> ConfigError:
    """Return the error that a model, :func:`called` so, cannot be sliced, with the layer and the reason."""
    return ConfigError(
        f"{model} cannot be sliced by width. Layer {place or '(the network itself)'}, {operation}: {why}. "
        f"{page('heterogeneous.md')} says what can be; a method whose models have one size, as fedcross, "
        "needs no slices."
    )
