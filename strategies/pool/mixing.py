"""Mixing matrices, the selection of collaborators, and the similarity of models.

A mixing matrix M turns the pool V of K models into W = M V. Slots that are not `members` of this round keep their
model. A selection returns m positions among the m valid models of a round; a model that is its own collaborator stays
unchanged. Of equal similarities the lowest position is taken; NaN is never taken. A similarity is an (m, m) matrix in
which larger means more similar, NaN for a model that is not finite; its diagonal is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcross.core.randomness import stream
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.loops import Matrix as Matrix

if TYPE_CHECKING:
    from fedcross.strategies.pool.pool import Entry, Pool

#: Values to compare: the trained ones, or float buffers as well; ``chunked`` over the state also uses counters.
Part: TypeAlias = Literal["parameters", "state"]
Partners = NDArray[np.int64]


@dataclass(frozen=True)
class Mixing:
    """A row-stochastic (K, K) matrix: ``rows[i][j] > 0`` is what slot i's new model takes of slot j's old one."""

    rows: tuple[Mapping[int, float], ...]

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Slots whose model changes, ascending."""
        return np.array([i for i, row in enumerate(self.rows) if set(row) != {i}], np.int64)

    def padded(self) -> tuple[NDArray[np.int64], Matrix]:
        """Return sources and weights (T, L) of the targets, padded with 0; the own slot comes first.

        If all targets become the same model, there is a single row (1, L) for all of them.
        """
        lists = [sorted(self.rows[i].items(), key=lambda pair: (pair[0] != i, pair[0])) for i in self.targets]
        if len(lists) > 1 and all(sorted(row) == sorted(lists[0]) for row in lists):
            lists = [sorted(lists[0])]
        length = max((len(row) for row in lists), default=0)
        pairs = np.array([row + [(row[0][0], 0.0)] * (length - len(row)) for row in lists], np.float64)
        return pairs[..., 0].astype(np.int64), np.ascontiguousarray(pairs[..., 1])

    def dense(self) -> Matrix:
        """Return the matrix (K, K)."""
        matrix = np.zeros((len(self.rows), len(self.rows)))
        for i, row in enumerate(self.rows):
            matrix[i, list(row)] = list(row.values())
        return matrix


def _with_members(k: int, members: Sequence[int], rows: Sequence[Sequence[tuple[int, float]]]) -> Mixing:
    """Return the mixing in which the i-th member gets ``rows[i]``, pairs of a position in `members` and a weight."""
    full: list[Mapping[int, float]] = [{i: 1.0} for i in range(k)]
    for slot, pairs in zip(members, rows, strict=True):
        row: dict[int, float] = {}
        for position, weight in pairs:
            if weight > 0:
                row[int(members[position])] = row.get(int(members[position]), 0.0) + weight
        full[slot] = dict.fromkeys(row, 1.0) if len(row) == 1 else row
    return Mixing(tuple(full))


def cross(
    k: int, members: Sequence[int], partners: Sequence[int] | NDArray[np.int64], alpha: float | Sequence[float]
) -> Mixing:
    """Cross-aggregation, ``w_i = alpha v_i + (1 - alpha) v_co(i)`` (FedCross, CrossAggr).

    `members` are the m slots of the k that take part, `partners` the position in `members` of each one's collaborator
    (its own: it keeps its model), `alpha` is the share of the own model, one number for all or one for each.
    """
    own = [alpha] * len(members) if isinstance(alpha, int | float) else alpha
    return _with_members(k, members, [[(i, own[i]), (int(co), 1.0 - own[i])] for i, co in enumerate(partners)])


def offsets(m: int, count: int, round_number: int) -> list[int]:
    """Return the distances of this round's propellers: that of in-order selection, and those that follow it."""
    return [(round_number - 1 + p) % (m - 1) + 1 for p in range(min(count, m - 1))] if m > 1 else []


def propellers(k: int, members: Sequence[int], distances: Sequence[int], own: float | None) -> Mixing:
    """Propeller models, ``w_i = own v_i + (1 - own)/P sum_p v_(i + o_p)``, with the P `distances` of :func:`offsets`.

    `own` is :func:`propeller_share`, None for 1/(P + 1). Without distances every model stays as it is.
    """
    m, p = len(members), len(distances)
    share = 1.0 / (p + 1) if own is None or not p else own
    rows = [[(i, share), *(((i + o) % m, (1.0 - share) / p) for o in distances)] for i in range(m)]
    return _with_members(k, members, rows)


def propeller_share(weighting: str, alpha: float, count: int) -> float | None:
    """Return the own model's share beside `count` propellers, which the papers do not state.

    ``equal``: None, all models weigh the same. ``each``: every propeller gets what a collaborator gets, 1 - alpha, and
    the own model ``1 - count (1 - alpha)``. ``alpha``: alpha for the own model, the propellers share the rest.
    """
    return {"equal": None, "alpha": alpha, "each": 1.0 - count * (1.0 - alpha)}[weighting]


def uniform(k: int, members: Sequence[int]) -> Mixing:
    """Give every member the mean of the members (the public code's first stage)."""
    m = len(members)
    return _with_members(k, members, [[(j, 1.0 / m) for j in range(m)]] * m)


def routing(k: int, members: Sequence[int], sources: Sequence[int] | NDArray[np.int64]) -> Mixing:
    """Give member i an exact copy of the model of member ``sources[i]``; a permutation only moves the models."""
    return _with_members(k, members, [[(int(source), 1.0)] for source in sources])


def identity(k: int) -> Mixing:
    """Leave every model as it is."""
    return Mixing(tuple({i: 1.0} for i in range(k)))


def chosen(mixing: Mixing, members: Sequence[int]) -> dict[str, float]:
    """Return ``chosen_I``, the number of *other* models that took a share of slot I, for pools of at most 20 models.

    ``chosen_most`` is the largest number, ``chosen_models`` how many models were chosen at all.
    """
    if not members:
        return {}
    times = Counter(source for slot in members for source in mixing.rows[slot] if source != slot)
    slots = range(len(mixing.rows)) if len(mixing.rows) <= 20 else ()
    most = {"chosen_most": float(max(times.values(), default=0)), "chosen_models": float(len(times))}
    return most | {f"chosen_{slot}": float(times[slot]) for slot in slots}


class Question(NamedTuple):
    """The input of a selection: m models, the round from 1, the run's seed, their similarity if the rule needs it."""

    m: int
    round_number: int
    seed: int = 0
    similarity: Matrix | None = None


class Selection(NamedTuple):
    """A rule that picks the collaborators of two models or more, and whether it needs their similarity."""

    rule: Callable[[Question], Partners]
    needs_similarity: bool = False

    def __call__(self, question: Question) -> Partners:
        """Return the collaborators (m,); one model alone is its own."""
        return self.rule(question) if question.m > 1 else np.arange(question.m)


def in_order(question: Question) -> Partners:
    """``co(i) = (i + (r mod (m - 1)) + 1) mod m`` with r = round - 1: a permutation, so the pool's mean stays the same.

    Over m - 1 rounds every ordered pair occurs once. As in the public code; the paper's Eq. 2 is off by one from it.
    """
    m = question.m
    return (np.arange(m) + (question.round_number - 1) % (m - 1) + 1) % m


def highest_similarity(question: Question) -> Partners:
    """``co(i) = argmax_(j != i) s_ij``. Not a permutation in general, so the pool's mean changes."""
    return _best(_compared(question))


def lowest_similarity(question: Question) -> Partners:
    """``co(i) = argmin_(j != i) s_ij``, the paper's choice; the pool's mean changes too."""
    return _best(-_compared(question))


def random(question: Question) -> Partners:
    """Draw a derangement, all equally likely, from (seed, round)."""
    generator = stream(question.seed, "selection", question.round_number)
    while True:  # about e draws
        partners = generator.permutation(question.m)
        if not (partners == np.arange(question.m)).any():
            return partners


def least_similar_derangement(question: Question) -> Partners:
    """Return the derangement of least total similarity (an assignment problem): the pool's mean stays the same.

    This project's. A pair that cannot be compared is never assigned, even if some models must keep their own.
    """
    from scipy.optimize import linear_sum_assignment

    cost = _compared(question)
    known = np.isfinite(cost)
    worst = (np.abs(cost[known]).max(initial=0.0) + 1.0) * 2 * question.m
    cost[~known] = np.inf
    np.fill_diagonal(cost, worst)  # more than any two assignments of known pairs can differ
    return np.asarray(linear_sum_assignment(cost)[1], dtype=np.int64)


def _compared(question: Question) -> Matrix:
    """Return a copy of the similarity with NaN on the diagonal."""
    similarity = np.array(question.similarity, np.float64)
    np.fill_diagonal(similarity, np.nan)
    return similarity


def _best(score: Matrix) -> Partners:
    """Return each row's position of the largest finite value, the lowest if several; its own if there is none."""
    finite = np.isfinite(score)
    return np.where(finite.any(axis=1), np.where(finite, score, -np.inf).argmax(axis=1), np.arange(len(score)))


SELECTIONS = {
    "in_order": Selection(in_order),
    "highest_similarity": Selection(highest_similarity, needs_similarity=True),
    "lowest_similarity": Selection(lowest_similarity, needs_similarity=True),
    "random": Selection(random),
    "least_similar_derangement": Selection(least_similar_derangement, needs_similarity=True),
}


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


#: Measures that only need the Gram matrix of the members, for callers that have one already.
FROM_GRAM: dict[str, Callable[[Matrix], Matrix]] = {"cosine": cosine, "paper": paper, "euclidean": euclidean}


def similarity(name: str, pool: Pool, members: Sequence[int], part: Part) -> Matrix:
    """Return the similarity (m, m) of the members by one of FROM_GRAM, ``chunked`` or ``manhattan``."""
    columns = pool.layout.columns(part)
    if name in FROM_GRAM:
        return FROM_GRAM[name](pool.gram(members, columns))
    if name == "manhattan":
        return -loops.summed(_distances, pool.rows, np.asarray(members, np.int64), columns)
    return chunked(pool, members, part)


def _distances(rows: NDArray[np.floating], members: NDArray[np.int64], block: slice) -> NDArray[np.floating]:
    """Return ``sum |x - y|`` of all pairs (m, m), in the dtype of the rows."""
    with np.errstate(invalid="ignore"):
        return np.stack([np.abs(rows[members, block] - row).sum(axis=1) for row in rows[members, block]])


def chunked(pool: Pool, members: Sequence[int], part: Part) -> Matrix:
    """Return the sum of cosines over pairs of consecutive entries, as the public code computes it.

    In ``state_dict`` order, entries 1 and 2 are concatenated, then 3 and 4, and so on; the cosines of these chunks are
    added up, that of a last pair twice. Over ``"state"`` counters are entries too.
    """

    def entry_gram(entry: Entry) -> Matrix:
        values = pool.integers[list(members), entry.start : entry.stop].astype(np.float64)
        return values @ values.T if entry.is_integer else pool.gram(members, slice(entry.start, entry.stop))

    grams = [entry_gram(entry) for entry in pool.layout.entries if part == "state" or entry.is_parameter]
    chunks = [cosine(np.sum(grams[first : first + 2], axis=0)) for first in range(0, len(grams), 2)]
    return sum(chunks, np.zeros_like(chunks[0])) + (chunks[-1] if len(grams) % 2 == 0 else 0.0)


@np.errstate(over="ignore", invalid="ignore")  # of models that are not finite: null in metrics.jsonl
def diagnostics(gram: Matrix, mixing: Mixing | None = None) -> dict[str, float]:
    """Return how similar the models of a pool are, from their Gram matrix (m, m); with `mixing`, after it: ``M G M^T``.

    ``pool_similarity_mean`` is the mean cosine over all pairs (1 if there is one model), ``pool_spread`` the root
    mean square distance of the models to their mean, relative to the mean's norm.
    """
    if mixing is not None:
        matrix = mixing.dense()
        gram = matrix @ gram @ matrix.T
    m = len(gram)
    squares = np.maximum(np.diag(gram), 0.0)  # models that cancel each other mix to rounding noise of either sign
    mean_square, scale = gram.sum() / m**2, np.sqrt(np.outer(squares, squares))
    pairs = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)[~np.eye(m, dtype=bool)]
    spread = np.sqrt(max(0.0, squares.mean() - mean_square) / mean_square) if mean_square > 0 else 0.0
    return {"pool_similarity_mean": float(pairs.mean()) if m > 1 else 1.0, "pool_spread": float(spread)}
