"""Mixing matrices, the selection of collaborators, and the similarity of models.

A mixing matrix M turns the pool V of K models into W = M V. Each function gives, for every slot, the slots that its new
model is made of and their weights. Slots that are not `members` of this round keep their model to the bit.

A selection returns m positions among the m valid models of a round. A model that is its own collaborator stays
unchanged. Of equal similarities the lowest position is taken; NaN is never taken.

A similarity is an (m, m) float64 matrix in which larger means more similar; the selections ignore its diagonal. A model
with NaN or infinite values has similarity NaN to all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcross.core.randomness import stream
from fedcross.strategies.pool import loops

if TYPE_CHECKING:
    from fedcross.strategies.pool.pool import Pool

Matrix: TypeAlias = NDArray[np.float64]
Part: TypeAlias = Literal["parameters", "state"]
"""Values to compare: the trained ones, or float buffers as well; ``chunked`` over the state also uses counters."""
Partners = NDArray[np.int64]
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


#: Up to this pool size the metrics have a count for each model (``chosen_0``, ``chosen_1``, ...).
COUNTED = 20


def chosen(mixing: Mixing, members: Sequence[int]) -> dict[str, float]:
    """Return how often each model was chosen: the number of *other* models that took a share of it in `mixing`.

    ``chosen_most`` is the largest number, ``chosen_models`` how many models were chosen at all, and ``chosen_I`` the
    number of slot I, for pools of no more than ``COUNTED`` models. Nothing without members.
    """
    if not members:
        return {}
    times = Counter(source for slot in members for source in mixing.rows[slot] if source != slot)
    most = {"chosen_most": float(max(times.values(), default=0)), "chosen_models": float(len(times))}
    if len(mixing.rows) > COUNTED:
        return most
    return most | {f"chosen_{slot}": float(times[slot]) for slot in range(len(mixing.rows))}


# ---- selection -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """The input of a selection.

    Parameters
    ----------
    m : int
        Valid models of the round.
    round_number : int
        Counted from 1, as Flower does.
    seed : int
        The run's seed.
    similarity : float64 array (m, m), optional
        Larger is more similar; the diagonal is ignored. Given only if the selection needs it.
    """

    m: int
    round_number: int
    seed: int = 0
    similarity: Matrix | None = None


@dataclass(frozen=True)
class Selection:
    """A rule that picks the collaborators of two models or more, and whether it needs their similarity."""

    rule: Callable[[Question], Partners]
    needs_similarity: bool = False

    def __call__(self, question: Question) -> Partners:
        """Return the collaborators (m,); with fewer than two models each is its own."""
        return self.rule(question) if question.m > 1 else np.arange(question.m)


def in_order(question: Question) -> Partners:
    """``co(i) = (i + (r mod (m - 1)) + 1) mod m`` with r = round - 1.

    A permutation, so the pool's mean stays the same; over m - 1 rounds every ordered pair occurs once. The paper's
    Eq. 2 is off by one if its indices start at 1; this follows the public code, whose r starts at 0.
    """
    m = question.m
    return (np.arange(m) + (question.round_number - 1) % (m - 1) + 1) % m


def highest_similarity(question: Question) -> Partners:
    """``co(i) = argmax_(j != i) s_ij``. Not a permutation in general, so the pool's mean changes."""
    return _best(_compared(question))


def lowest_similarity(question: Question) -> Partners:
    """``co(i) = argmin_(j != i) s_ij``, the paper's choice. Not a permutation in general, so the pool's mean changes.

    A poisoned model can be the least similar one to all others, so uploads must be validated before this.
    """
    return _best(-_compared(question))


def random(question: Question) -> Partners:
    """Draw a derangement, all equally likely, from (seed, round)."""
    generator = stream(question.seed, "selection", question.round_number)
    while True:  # about e draws
        partners = generator.permutation(question.m)
        if not (partners == np.arange(question.m)).any():
            return partners


def least_similar_derangement(question: Question) -> Partners:
    """Return the derangement of least total similarity (an assignment problem): each model is chosen exactly once.

    This project's more robust form of lowest similarity: the mean of the pool stays the same. A pair that cannot be
    compared is never assigned; where that leaves no derangement, as few models as possible keep their own.
    """
    from scipy.optimize import linear_sum_assignment

    cost = _compared(question)
    unknown = ~np.isfinite(cost)
    known = cost[~unknown]
    worst = (np.abs(known).max() + 1.0) * 2 * question.m if known.size else 1.0
    cost[unknown] = np.inf
    np.fill_diagonal(cost, worst)  # more than any two assignments of known pairs can differ
    return np.asarray(linear_sum_assignment(cost)[1], dtype=np.int64)


def _compared(question: Question) -> Matrix:
    """Return a copy of the similarity with NaN on the diagonal."""
    if question.similarity is None or question.similarity.shape != (question.m, question.m):
        raise ValueError(f"this selection needs a similarity of shape {(question.m, question.m)}")
    similarity = question.similarity.astype(np.float64)
    np.fill_diagonal(similarity, np.nan)
    return similarity


def _best(score: Matrix) -> Partners:
    """Return each row's position of the largest finite value, the lowest if several; its own if there is none."""
    finite = np.isfinite(score)
    partners = np.where(finite, score, -np.inf).argmax(axis=1)
    return np.where(finite.any(axis=1), partners, np.arange(len(score)))


SELECTIONS = {
    "in_order": Selection(in_order),
    "highest_similarity": Selection(highest_similarity, needs_similarity=True),
    "lowest_similarity": Selection(lowest_similarity, needs_similarity=True),
    "random": Selection(random),
    "least_similar_derangement": Selection(least_similar_derangement, needs_similarity=True),
}


# ---- similarity ----------------------------------------------------------------------------------------------------


def cosine(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| |y|)``; 0 where a norm is 0 (as torch does)."""
    norms = np.sqrt(np.diag(gram))
    return _divide(gram, np.outer(norms, norms))


def paper(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| + |y|)``, literally FedCross's Eq. 5: it has the *sum* of norms, so it grows with the norms."""
    norms = np.sqrt(np.diag(gram))
    return _divide(gram, norms[:, None] + norms[None, :])


def euclidean(gram: Matrix) -> Matrix:
    """``-|x - y|``, by ``|x|^2 + |y|^2 - 2 <x, y>``."""
    squares = np.diag(gram)
    with np.errstate(invalid="ignore"):
        return -np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))


def _divide(gram: Matrix, scale: Matrix) -> Matrix:
    with np.errstate(invalid="ignore"):
        return np.divide(gram, scale, out=np.zeros_like(gram), where=scale != 0)


def chunked(pool: Pool, members: Sequence[int], part: Part) -> Matrix:
    """Return the sum of cosines over pairs of consecutive entries, as the public code computes it.

    In ``state_dict`` order, entries 1 and 2 are concatenated, then 3 and 4, and so on; the cosines of these chunks are
    added up. Afterwards the code adds the cosine of its last chunk once more: of the last pair, which then counts
    twice, or of an odd last entry alone. Over ``"state"`` counters are entries too, as in the code.
    """
    entries = [entry for entry in pool.layout.entries if part == "state" or entry.is_parameter]
    slots = np.asarray(members, np.int64)

    def entry_gram(start: int, stop: int, is_integer: bool) -> Matrix:
        values = pool.integers[slots, start:stop].astype(np.float64)
        return values @ values.T if is_integer else pool.gram(members, slice(start, stop))

    grams = [entry_gram(entry.start, entry.stop, entry.is_integer) for entry in entries]
    chunks = [cosine(np.sum(grams[first : first + 2], axis=0)) for first in range(0, len(grams), 2)]
    total = np.zeros((len(slots), len(slots)))
    for chunk in chunks:
        total = total + chunk
    return total + chunks[-1] if len(grams) % 2 == 0 else total


FROM_GRAM: dict[str, Callable[[Matrix], Matrix]] = {"cosine": cosine, "paper": paper, "euclidean": euclidean}
"""Measures that only need the Gram matrix of the members, for callers that have one already."""


def similarity(name: str, pool: Pool, members: Sequence[int], part: Part) -> Matrix:
    """Return the similarity (m, m) of the members by one of FROM_GRAM, ``chunked`` or ``manhattan``."""
    columns = pool.layout.columns(part)
    if name in FROM_GRAM:
        return FROM_GRAM[name](pool.gram(members, columns))
    if name == "manhattan":
        return -loops.manhattan(pool.rows, np.asarray(members, np.int64), columns)
    return chunked(pool, members, part)
