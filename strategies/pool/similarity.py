"""Similarity of models: (m, m) float64 matrices in which larger always means more similar.

``cosine``, ``paper`` and ``euclidean`` come from one Gram matrix; ``chunked`` from one Gram matrix per entry, which
is one pass over memory as well; ``manhattan`` compares every pair. Distances are negated. The diagonal is computed like
every other pair, but the selections ignore it. A model with NaN or infinite values has similarity NaN to all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, nearest
from fedcross.strategies.pool import blocks
from fedcross.strategies.pool.pool import Pool

Matrix: TypeAlias = NDArray[np.float64]
Part: TypeAlias = Literal["parameters", "state"]
"""Values to compare: the trained ones, or float buffers as well; ``chunked`` over the state also uses counters."""


def cosine(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| |y|)``; 0 where a norm is 0 (as torch does)."""
    norms = np.sqrt(np.diag(gram))
    return _divide(gram, np.outer(norms, norms))


def paper(gram: Matrix) -> Matrix:
    """``<x, y> / (|x| + |y|)``, literally FedCross's Eq. 5: it has the *sum* of norms, so it grows with the norms."""
    norms = np.sqrt(np.diag(gram))
    return _divide(gram, norms[:, None] + norms[None, :])


def euclidean(gram: Matrix) -> Matrix:
    """``-|x - y|``, by ``|x|^2 + |y|^2 - 2 <x, y>``.

    A difference of large numbers: with float32 rows, distances below about 3e-4 of the norms are rounding noise.
    """
    squares = np.diag(gram)
    with np.errstate(invalid="ignore"):
        return -np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))


def _divide(gram: Matrix, scale: Matrix) -> Matrix:
    result = np.zeros_like(gram)
    with np.errstate(invalid="ignore"):
        np.divide(gram, scale, out=result, where=scale != 0)
    return result


def _from_gram(measure: Callable[[Matrix], Matrix]) -> Callable[[Pool, Sequence[int], Part], Matrix]:
    return lambda pool, members, part: measure(pool.gram(members, pool.layout.columns(part)))


def chunked(pool: Pool, members: Sequence[int], part: Part) -> Matrix:
    """Return the sum of cosines over pairs of consecutive entries, as the public code computes it.

    In ``state_dict`` order, entries 1 and 2 are concatenated, then 3 and 4, and so on; the cosines of these chunks are
    added up. Afterwards the code adds the cosine of its last chunk once more: of the last pair, which then counts
    twice, or of an odd last entry alone. A bias counts as much as a convolution. Over ``"state"`` counters are entries
    too, as in the code; over ``"parameters"`` neither counters nor buffers are.
    """
    entries = [entry for entry in pool.layout.entries if part == "state" or entry.is_parameter]
    slots = np.asarray(members, np.int64)

    def entry_gram(start: int, stop: int, is_integer: bool) -> Matrix:
        if is_integer:
            values = pool.integers[slots, start:stop].astype(np.float64)
            return values @ values.T
        return pool.gram(members, slice(start, stop))

    grams = [entry_gram(entry.start, entry.stop, entry.is_integer) for entry in entries]
    total = np.zeros((len(slots), len(slots)))
    chunk = total
    for first in range(0, len(grams), 2):
        chunk = cosine(np.sum(grams[first : first + 2], axis=0))
        total = total + chunk
    return total + chunk if len(grams) % 2 == 0 else total


def manhattan(pool: Pool, members: Sequence[int], part: Part) -> Matrix:
    """``-sum |x - y|``, summed in the models' dtype inside a block and in float64 across blocks."""
    return -blocks.manhattan(pool.rows, np.asarray(members, np.int64), pool.layout.columns(part))


SIMILARITIES: dict[str, Callable[[Pool, Sequence[int], Part], Matrix]] = {
    "cosine": _from_gram(cosine),
    "paper": _from_gram(paper),
    "chunked": chunked,
    "euclidean": _from_gram(euclidean),
    "manhattan": manhattan,
}
FROM_GRAM: dict[str, Callable[[Matrix], Matrix]] = {"cosine": cosine, "paper": paper, "euclidean": euclidean}
"""Measures that only need the Gram matrix of the members, for callers that have one already."""


def find_similarity(name: str) -> Callable[[Pool, Sequence[int], Part], Matrix]:
    """Return the measure of that name, a function of (pool, members, part).

    Raises
    ------
    ConfigError
        If there is none; the message names the nearest one.
    """
    if name not in SIMILARITIES:
        raise ConfigError(f"similarity={name!r} does not exist. {nearest(name, list(SIMILARITIES))}")
    return SIMILARITIES[name]
