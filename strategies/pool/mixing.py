"""Mixing matrices: sparse row-stochastic (K, K) matrices that say which models are averaged into which.

A mixing matrix M turns the pool V of K models into W = M V. Each function here gives, for every slot, the slots that
its new model is made of and their weights. Slots that are not `members` of this round keep their model to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Mixing:
    """A row-stochastic (K, K) matrix as K lists of (slot, weight).

    Parameters
    ----------
    rows : tuple of mappings
        ``rows[i][j]`` is the weight above 0 that slot i's new model gives to slot j's old one.

    Raises
    ------
    ValueError
        If a weight is not above 0, a slot does not exist, or a row does not sum to 1.
    """

    rows: tuple[Mapping[int, float], ...]

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if not row or not all(0 <= j < len(self.rows) and w > 0 for j, w in row.items()):
                raise ValueError(
                    f"row {i} of a mixing matrix needs slots below {len(self.rows)} and weights > 0: {row}"
                )
            if abs(sum(row.values()) - 1) > TOLERANCE:
                raise ValueError(f"row {i} of a mixing matrix sums to {sum(row.values())}, not to 1: {row}")

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Slots whose model changes, ascending."""
        return np.array([i for i, row in enumerate(self.rows) if set(row) != {i}], np.int64)

    def padded(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return sources and weights of the targets as two arrays (T, L), padded with weight 0.

        A target's own slot comes first, then the others ascending. If all targets become the same model, there is a
        single row (1, L) for all of them.
        """
        rows = [self.rows[i] for i in self.targets]
        if len(rows) > 1 and all(row == rows[0] for row in rows):
            lists = [sorted(rows[0].items())]
        else:
            lists = [sorted(self.rows[i].items(), key=lambda pair: (pair[0] != i, pair[0])) for i in self.targets]
        length = max((len(row) for row in lists), default=0)
        index = np.array([[j for j, _ in row] + [row[0][0]] * (length - len(row)) for row in lists], np.int64)
        weight = np.array([[w for _, w in row] + [0.0] * (length - len(row)) for row in lists], np.float64)
        return index, weight

    def dense(self) -> NDArray[np.float64]:
        """Return the matrix (K, K)."""
        matrix = np.zeros((len(self.rows), len(self.rows)))
        for i, row in enumerate(self.rows):
            for j, weight in row.items():
                matrix[i, j] = weight
        return matrix


def _with_members(k: int, members: Sequence[int], rows: Sequence[Mapping[int, float]]) -> Mixing:
    """Translate rows from positions 0..m-1 to the members' slots; every other slot keeps its model."""
    slots = [int(slot) for slot in members]
    if len(set(slots)) != len(slots):
        raise ValueError(f"members of a mixing must be distinct slots, not {slots}")
    full: list[Mapping[int, float]] = [{i: 1.0} for i in range(k)]
    for slot, row in zip(slots, rows, strict=True):
        full[slot] = {slots[j]: weight for j, weight in row.items()}
    return Mixing(tuple(full))


def _combine(pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Add weights that go to the same slot and leave out zeros."""
    row: dict[int, float] = {}
    for slot, weight in pairs:
        if weight > 0:
            row[slot] = row.get(slot, 0.0) + weight
    return dict.fromkeys(row, 1.0) if len(row) == 1 else row


def cross(
    k: int, members: Sequence[int], partners: Sequence[int] | NDArray[np.int64], alpha: float | Sequence[float]
) -> Mixing:
    """Cross-aggregation, ``w_i = alpha v_i + (1 - alpha) v_co(i)`` (FedCross, CrossAggr).

    Parameters
    ----------
    k : int
        Slots of the pool.
    members : sequence of int
        The m slots that take part.
    partners : sequence of int, length m
        Position in `members` of each member's collaborator; its own position means that it keeps its model.
    alpha : float or sequence of float, length m
        Share of the own model, 0 to 1; one number for all, or one for each.
    """
    own = [alpha] * len(members) if isinstance(alpha, int | float) else alpha
    pairs = [_combine([(i, own[i]), (int(co), 1.0 - own[i])]) for i, co in enumerate(partners)]
    return _with_members(k, members, pairs)


def offsets(m: int, count: int, round_number: int) -> list[int]:
    """Return the distances of this round's propellers: `count` distinct values of 1..m-1, in order.

    The first is the in-order collaborator's; the others follow it cyclically. No more than m - 1 exist.
    Rounds are counted from 1.
    """
    if m < 2:
        return []
    return [(round_number - 1 + p) % (m - 1) + 1 for p in range(min(count, m - 1))]


def propellers(k: int, members: Sequence[int], distances: Sequence[int], own: float | None) -> Mixing:
    """Propeller models, ``w_i = own v_i + (1 - own)/P sum_p v_(i + o_p)``.

    The papers do not state the weights; :func:`propeller_share` gives `own` for each of the possible choices.

    Parameters
    ----------
    k, members
        As in :func:`cross`.
    distances : sequence of int
        P distinct offsets, from :func:`offsets`; empty leaves every model as it is.
    own : float or None
        Share of the own model, or None for 1/(P + 1).
    """
    m, p = len(members), len(distances)
    if not p:
        return identity(k)
    share = 1.0 / (p + 1) if own is None else own
    rows = [_combine([(i, share)] + [((i + o) % m, (1.0 - share) / p) for o in distances]) for i in range(m)]
    return _with_members(k, members, rows)


def propeller_share(weighting: str, alpha: float, count: int) -> float | None:
    """Return the own model's share beside `count` propellers; None stands for 1/(count + 1).

    ``equal``: all models weigh the same. ``each``: every propeller gets what a collaborator gets, 1 - alpha, and the
    own model ``1 - count (1 - alpha)``. ``alpha``: alpha for the own model, the propellers share the rest.
    """
    if weighting == "equal":
        return None
    return alpha if weighting == "alpha" else 1.0 - count * (1.0 - alpha)


def uniform(k: int, members: Sequence[int]) -> Mixing:
    """Give every member the mean of the members (the public code's first stage)."""
    m = len(members)
    return _with_members(k, members, [_combine([(j, 1.0 / m) for j in range(m)]) for _ in range(m)])


def routing(k: int, members: Sequence[int], sources: Sequence[int] | NDArray[np.int64]) -> Mixing:
    """Give member i an exact copy of the model of member ``sources[i]``; a permutation only moves the models."""
    return _with_members(k, members, [{int(source): 1.0} for source in sources])


def identity(k: int) -> Mixing:
    """Leave every model as it is."""
    return Mixing(tuple({i: 1.0} for i in range(k)))
