"""Selection: it picks the collaborator of each of this round's m valid models.

Every selection returns m positions (0-based, among the valid models). A model that is its own collaborator stays
unchanged. Of equal similarities the lowest position is taken, and NaN is never taken: a model that cannot be compared
with any other stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.randomness import stream

Partners = NDArray[np.int64]


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
    similarity: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Selection:
    """A selection rule and its name.

    Parameters
    ----------
    name : str
        As in the configuration.
    needs_similarity : bool
        Whether :attr:`Question.similarity` must be given.
    rule : callable
        Returns the collaborators for two models or more.
    """

    name: str
    needs_similarity: bool
    rule: Callable[[Question], Partners]

    def __call__(self, question: Question) -> Partners:
        """Return the collaborators (m,); with fewer than two models each is its own."""
        if question.m <= 1:
            return np.arange(question.m)
        return self.rule(question)


def find_selection(name: str) -> Selection:
    """Return the selection of that name.

    Raises
    ------
    ConfigError
        If there is none; the message names the nearest one.
    """
    if name not in SELECTIONS:
        raise ConfigError(f"selection={name!r} does not exist. {nearest(name, list(SELECTIONS))}")
    return SELECTIONS[name]


def in_order(question: Question) -> Partners:
    """``co(i) = (i + (r mod (m - 1)) + 1) mod m`` with r = round - 1.

    A permutation, so the pool's mean stays the same; over m - 1 rounds every ordered pair occurs once. The paper's
    Eq. 2 is off by one if its indices start at 1; this follows the public code, whose r starts at 0.
    """
    m = question.m
    return (np.arange(m) + (question.round_number - 1) % (m - 1) + 1) % m


def highest_similarity(question: Question) -> Partners:
    """``co(i) = argmax_(j != i) s_ij``. Not a permutation in general, so the pool's mean changes."""
    return _best(_similarity(question))


def lowest_similarity(question: Question) -> Partners:
    """``co(i) = argmin_(j != i) s_ij``, the paper's choice. Not a permutation in general, so the pool's mean changes.

    A poisoned model can be the least similar one to all others, so uploads must be validated before this.
    """
    return _best(-_similarity(question))


def random(question: Question) -> Partners:
    """Draw a derangement, all equally likely, from (seed, round)."""
    generator = stream(question.seed, "selection", question.round_number)
    while True:  # about e draws
        partners = generator.permutation(question.m)
        if not (partners == np.arange(question.m)).any():
            return partners


def least_similar_derangement(question: Question) -> Partners:
    """Return the derangement of least total similarity (an assignment problem): each model is chosen exactly once.

    This project's more robust form of lowest similarity: the mean of the pool stays the same and no model is chosen
    twice. A pair that cannot be compared is never assigned. Where that leaves no derangement, as few models as possible
    keep their own; the result is a permutation in any case.
    """
    from scipy.optimize import linear_sum_assignment

    cost = _similarity(question).copy()
    unknown = ~np.isfinite(cost)
    known = cost[~unknown]
    worst = (np.abs(known).max() + 1.0) * 2 * question.m if known.size else 1.0
    cost[unknown] = np.inf
    np.fill_diagonal(cost, worst)  # more than any two assignments of known pairs can differ
    partners: Partners = linear_sum_assignment(cost)[1].astype(np.int64)
    return partners


def _similarity(question: Question) -> NDArray[np.float64]:
    """Return the similarity with NaN on the diagonal."""
    if question.similarity is None or question.similarity.shape != (question.m, question.m):
        shape = None if question.similarity is None else question.similarity.shape
        raise ValueError(f"this selection needs a similarity of shape {(question.m, question.m)}, not {shape}")
    similarity = question.similarity.astype(np.float64)
    np.fill_diagonal(similarity, np.nan)
    return similarity


def _best(score: NDArray[np.float64]) -> Partners:
    """Return each row's position of the largest finite value, the lowest if several; its own if there is none."""
    finite = np.isfinite(score)
    partners = np.where(finite, score, -np.inf).argmax(axis=1)
    return np.where(finite.any(axis=1), partners, np.arange(len(score)))


SELECTIONS = {
    rule.name: rule
    for rule in (
        Selection("in_order", False, in_order),
        Selection("highest_similarity", True, highest_similarity),
        Selection("lowest_similarity", True, lowest_similarity),
        Selection("random", False, random),
        Selection("least_similar_derangement", True, least_similar_derangement),
    )
}
