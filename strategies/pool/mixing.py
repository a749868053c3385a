"""Mixing matrices, the selection of collaborators, and the similarity of models.

A mixing matrix M, row-stochastic (K, K), turns the pool V of K models into W = M V. Slots that are not `members` of
this round keep their model. A selection returns m positions among the m valid models of a round; a model that is its
own collaborator stays unchanged. Of equal similarities the lowest position is taken; NaN is never taken. A similarity
is an (m, m) matrix in which larger means more similar, NaN for a model that is not finite; its diagonal is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.randomness import stream
from fedcross.strategies.pool import loops
from fedcross.strategies.pool.loops import Matrix as Matrix

if TYPE_CHECKING:
    from fedcross.strategies.pool.pool import Entry, Pool

#: Values to compare: the trained ones, or float buffers as well; ``chunked`` over the state also uses counters.
Part: TypeAlias = Literal["parameters", "state"]
Collaborators = NDArray[np.int64]
Members = Sequence[int]


def cross(k: int, members: Members, collaborators: Members | Collaborators, alpha: float | Sequence[float]) -> Matrix:
    """Cross-aggregation, ``w_i = alpha v_i + (1 - alpha) v_co(i)`` (FedCross, CrossAggr).

    `members` are the m slots of the k that take part, `collaborators` the position in `members` of the collaborator of
    each (its own: it keeps its model), `alpha` is the share of the own model, one number for all or one for each.
    """
    mixing, slots = np.eye(k), np.asarray(members, np.int64)
    mixing[slots, slots] = alpha
    mixing[slots, slots[np.asarray(collaborators, np.int64)]] += 1.0 - np.asarray(alpha)
    return mixing


def propellers(k: int, members: Members, distances: Sequence[int], own: float | None) -> Matrix:
    """Propeller models, ``w_i = own v_i + (1 - own)/P sum_p v_(i + o_p)``, with the P `distances` of :func:`offsets`.

    An `own` of None is 1/(P + 1). Without distances every model stays as it is.
    """
    mixing, slots, p = np.eye(k), np.asarray(members, np.int64), len(distances)
    share = 1.0 / (p + 1) if own is None or not p else own
    mixing[slots, slots] = share
    for distance in distances:
        mixing[slots, np.roll(slots, -distance)] = (1.0 - share) / p
    return mixing


def offsets(m: int, count: int, round_number: int) -> list[int]:
    """Return the distances of this round's propellers: that of in-order selection, and those that follow it."""
    return [(round_number - 1 + p) % (m - 1) + 1 for p in range(min(count, m - 1))] if m > 1 else []


def uniform(k: int, members: Members) -> Matrix:
    """Give every member the mean of the members (the public code's first stage)."""
    mixing = np.eye(k)
    mixing[np.ix_(members, members)] = 1.0 / max(1, len(members))
    return mixing


def among(mixing: Matrix, allowed: NDArray[np.bool_]) -> Matrix:
    """Return `mixing` with only the `allowed` (K, K) sources; the other weights are scaled up to sum to 1.

    A slot that is left without any keeps its model.
    """
    kept = np.where(allowed, mixing, 0.0)
    total = kept.cumsum(axis=1)[:, -1:]
    scaled = np.divide(kept, total, out=np.eye(len(mixing)), where=total > 0)
    return np.where((kept != mixing).any(axis=1, keepdims=True), scaled, mixing)


def mixed_integers(values: NDArray[Any], weights: Matrix) -> NDArray[Any]:
    """Return weighted means of integers ``weights @ values`` (m, i), of the dtype of `values` (n, i).

    A mean within 1e-6 of an integer becomes that integer, another is truncated towards zero. A value that all sources
    (those of a weight above 0) share stays as it is, however large. Rows of `weights` (m, n) sum to 1.
    """
    floats = values.astype(np.float64)
    mixed = np.empty((len(weights), values.shape[1]), values.dtype)
    for row, shares in zip(mixed, weights):
        sources = np.flatnonzero(shares)
        first = floats[sources[0]]
        mean = first + shares[sources] @ (floats[sources] - first)
        shared = (values[sources] == values[sources[0]]).all(axis=0)
        row[...] = np.where(shared, values[sources[0]], truncated(mean).astype(values.dtype))
    return mixed


def truncated(values: NDArray[Any]) -> NDArray[Any]:
    """Return float64 `values` within 1e-6 of an integer as that integer, others truncated towards zero."""
    nearest = np.rint(values)
    found = np.where(np.abs(values - nearest) <= 1e-6, nearest, np.trunc(values))
    bounded: NDArray[Any] = np.clip(found, -(2.0**63), np.nextafter(2.0**63, 0))
    return bounded


def chosen(mixing: Matrix, members: Members) -> dict[str, float]:
    """Return ``chosen_I``, the number of *other* models that took a share of slot I, for pools of at most 20 models.

    ``chosen_most`` is the largest number, ``chosen_models`` how many models were chosen at all.
    """
    if not members:
        return {}
    times = ((mixing > 0) & ~np.eye(len(mixing), dtype=bool))[list(members)].sum(axis=0)
    most = {"chosen_most": float(times.max()), "chosen_models": float(np.count_nonzero(times))}
    return most | {f"chosen_{slot}": float(count) for slot, count in enumerate(times) if len(times) <= 20}


def in_order(m: int, round_number: int) -> Collaborators:
    """``co(i) = (i + (r mod (m - 1)) + 1) mod m`` with r = round - 1: a permutation, so the pool's mean stays the same.

    Over m - 1 rounds every ordered pair occurs once. As in the public code; the paper's Eq. 2 is off by one from it.
    """
    return (np.arange(m) + (round_number - 1) % (m - 1) + 1) % m


def random(m: int, round_number: int, seed: int) -> Collaborators:
    """Draw a derangement, all equally likely, from (seed, round)."""
    generator = stream(seed, "selection", round_number)
    while True:  # about e draws
        collaborators = generator.permutation(m)
        if not (collaborators == np.arange(m)).any():
            return collaborators


def highest_similarity(similarity: Matrix) -> Collaborators:
    """``co(i) = argmax_(j != i) s_ij``, its own if none is finite. The pool's mean changes in general."""
    score = np.where(np.isfinite(similarity) & ~np.eye(len(similarity), dtype=bool), similarity, -np.inf)
    return np.where((score > -np.inf).any(axis=1), score.argmax(axis=1), np.arange(len(score)))


def lowest_similarity(similarity: Matrix) -> Collaborators:
    """``co(i) = argmin_(j != i) s_ij``, the paper's choice; the pool's mean changes too."""
    return highest_similarity(-similarity)


def least_similar_derangement(similarity: Matrix) -> Collaborators:
    """Return the derangement of least total similarity (an assignment problem): the pool's mean stays the same.

    This project's. A pair that cannot be compared is never assigned, even if some models must keep their own.
    """
    from scipy.optimize import linear_sum_assignment

    known = np.isfinite(similarity) & ~np.eye(len(similarity), dtype=bool)
    cost = np.where(known, similarity, np.inf)
    worst = (np.abs(cost[known]).max(initial=0.0) + 1.0) * 2 * len(cost)
    np.fill_diagonal(cost, worst)  # more than any two assignments of known pairs can differ
    return np.asarray(linear_sum_assignment(cost)[1], dtype=np.int64)


#: The selections that compare models.
BY_SIMILARITY = {rule.__name__: rule for rule in (highest_similarity, lowest_similarity, least_similar_derangement)}
SELECTIONS = ("in_order", "random", *BY_SIMILARITY)


def select(name: str, m: int, round_number: int, seed: int, similarity: Matrix | None = None) -> Collaborators:
    """Return the collaborators (m,) by one of SELECTIONS; one model alone is its own.

    The rules in BY_SIMILARITY need `similarity` (m, m). Rounds count from 1. A ConfigError names an unknown selection.
    """
    if name not in SELECTIONS:
        raise ConfigError(f"selection={name!r}: there is no such selection. {nearest(name, SELECTIONS)}")
    if m < 2:
        return np.arange(m)
    if name in BY_SIMILARITY:
        if similarity is None:
            raise ConfigError(f"selection={name}: it compares models; hand it their similarity, a matrix ({m}, {m}).")
        return BY_SIMILARITY[name](similarity)
    return in_order(m, round_number) if name == "in_order" else random(m, round_number, seed)


def cosine(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| |y|)``; 0 where a norm is 0 (as torch does)."""
    norms = np.sqrt(np.diag(gram))
    return _divide(gram, np.outer(norms, norms))


def paper(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| + |y|)``, literally FedCross's Eq. 5: it has the *sum* of norms, so it grows with the norms."""
    norms = np.sqrt(np.diag(gram))
    return _divide(gram, norms[:, None] + norms[None, :])


@np.errstate(invalid="ignore")
def euclidean(gram: Matrix) -> Matrix:
    """``-|x - y|``, by ``|x|^2 + |y|^2 - 2 <x, y>``."""
    squares = np.diag(gram)
    return -np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))


@np.errstate(invalid="ignore")
def _divide(gram: Matrix, scale: Matrix) -> Matrix:
    return np.divide(gram, scale, out=np.zeros_like(gram), where=scale != 0)


#: Measures that only need the Gram matrix.
FROM_GRAM: dict[str, Callable[[Matrix], Matrix]] = {"cosine": cosine, "paper": paper, "euclidean": euclidean}


def similarity(name: str, pool: Pool, members: Members, part: Part) -> tuple[Matrix, Matrix | None]:
    """Return the similarity (m, m) of the members, and the Gram matrix (K, K) of the pool if it was computed.

    `name` is one of FROM_GRAM, ``chunked`` or ``manhattan``. By FROM_GRAM models of different widths are compared on
    the corner that both have; the Gram matrix is then that of the narrowest corner.
    """
    slots, columns = np.asarray(members, np.int64), pool.layout.columns(part)
    if name == "manhattan":
        return -loops.summed(_distances, pool.rows, slots, columns), None
    if name == "chunked":
        return _chunked(pool, slots, part), None
    gram = pool.gram(columns=columns)
    found, total = FROM_GRAM[name](gram), gram.copy()
    for band in pool.bands[1:]:
        have = np.flatnonzero(pool.ranks >= band.rank)
        if band.trained and len(have):
            total[np.ix_(have, have)] += loops.gram(pool.rows, have, band.columns)
            found[np.ix_(have, have)] = FROM_GRAM[name](total[np.ix_(have, have)])
    return found[np.ix_(slots, slots)], gram


def _distances(rows: NDArray[np.floating], members: NDArray[np.int64], block: slice) -> NDArray[np.floating]:
    """Return ``sum |x - y|`` of all pairs (m, m), in the dtype of the rows."""
    with np.errstate(invalid="ignore"):
        return np.stack([np.abs(rows[members, block] - row).sum(axis=1) for row in rows[members, block]])


def _chunked(pool: Pool, slots: NDArray[np.int64], part: Part) -> Matrix:
    """Return the sum of cosines over pairs of consecutive entries, as the public code computes it.

    In ``state_dict`` order, entries 1 and 2 are concatenated, then 3 and 4, and so on; the cosines of these chunks are
    added up, that of a last pair twice. Over ``"state"`` counters are entries too.
    """

    def entry_gram(entry: Entry) -> Matrix:
        values = pool.integers[slots, entry.place].astype(np.float64)
        return values @ values.T if entry.is_integer else pool.gram(slots, entry.place)

    grams = [entry_gram(entry) for entry in pool.layout.entries if part == "state" or entry.is_parameter]
    chunks = [cosine(np.sum(grams[first : first + 2], axis=0)) for first in range(0, len(grams), 2)]
    return sum(chunks, np.zeros_like(chunks[0])) + (chunks[-1] if len(grams) % 2 == 0 else 0.0)


@np.errstate(over="ignore", invalid="ignore")  # of models that are not finite: null in metrics.jsonl
def diagnostics(gram: Matrix, mixing: Matrix | None = None) -> dict[str, float]:
    """Return how similar the models of a pool are, from their Gram matrix (m, m); with `mixing`, after it: ``M G M^T``.

    ``pool_similarity_mean`` is the mean cosine over all pairs (1 if there is one model), ``pool_spread`` the root
    mean square distance of the models to their mean, relative to the mean's norm.
    """
    if mixing is not None:
        gram = mixing @ gram @ mixing.T
    m = len(gram)
    squares = np.maximum(np.diag(gram), 0.0)  # models that cancel each other mix to rounding noise of either sign
    mean_square, scale = gram.sum() / m**2, np.sqrt(np.outer(squares, squares))
    pairs = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)[~np.eye(m, dtype=bool)]
    spread = np.sqrt(max(0.0, squares.mean() - mean_square) / mean_square) if mean_square > 0 else 0.0
    return {"pool_similarity_mean": float(pairs.mean()) if m > 1 else 1.0, "pool_spread": float(spread)}
