"""Assigns each model its next client from a matrix of costs: minimum-cost assignment, greedy, literal, random.

Rows are models, columns are clients; ``costs[i, j]`` is the cost of training model i at client j. ``stay[i, j]`` marks
the client that trained model i last. Every model moves to another client wherever that is possible.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Stay = NDArray[np.bool_]
Hosts = NDArray[np.int64]

#: Number of random permutations drawn before the one in which the fewest models stay is used.
TRIES = 1000


def assignment(costs: Costs, stay: Stay) -> Hosts:
    """Return the column of each row in the permutation of least total cost.

    A model that stays costs more than all models that move together, so one stays only if no permutation moves all.

    Parameters
    ----------
    costs : array (n, n)
        Finite.
    stay : bool array (n, n)
        True at the client that trained the model last.
    """
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(_penalised(costs, stay))[1], dtype=np.int64)


def greedy(costs: Costs, stay: Stay) -> Hosts:
    """Return each row's column: row after row takes the cheapest column that is still free.

    A row skips a column if the last row would then have to stay at its client. Of equal costs the lower column wins.
    """
    n = len(costs)
    dear = _penalised(costs, stay)
    free = list(range(n))
    hosts = np.empty(n, dtype=np.int64)
    for row in range(n):
        ordered = sorted(free, key=lambda column: (dear[row, column], column))
        good = [column for column in ordered if not _strands_last(row, column, free, stay)]
        hosts[row] = (good or ordered)[0]
        free.remove(int(hosts[row]))
    return hosts


def literal(costs: Costs, stay: Stay) -> Hosts:
    """Return each row's cheapest column: several models may meet at one client, and a client may get none."""
    return np.asarray(_penalised(costs, stay).argmin(axis=1), dtype=np.int64)


def random(stay: Stay, generator: np.random.Generator) -> Hosts:
    """Return a uniform draw among the permutations in which no model stays (derangements, if all models are apart)."""
    n = len(stay)
    rows = np.arange(n)
    best, fewest = rows, n + 1
    for _ in range(TRIES):
        drawn = generator.permutation(n)
        staying = int(stay[rows, drawn].sum())
        if staying < fewest:
            best, fewest = drawn, staying
        if fewest == 0:
            break
    return best.astype(np.int64)


MATCHINGS: dict[str, Callable[[Costs, Stay], Hosts]] = {"assignment": assignment, "greedy": greedy, "literal": literal}


def consistency(
    weight: NDArray[np.generic], bias: NDArray[np.generic] | None, vectors: NDArray[np.floating], present: Stay
) -> float:
    """Return v_ij = CE(H_i(U_j), Y_j): how well classifier i recognises the prototypes of client j, in nats.

    Parameters
    ----------
    weight, bias : arrays (classes, embedding) and (classes,)
        The linear classifier H_i.
    vectors : array (classes, embedding)
        Prototypes U_j, one per class.
    present : bool array (classes,)
        Classes that client j holds; the mean is over these. Without any it is 0.
    """
    held = np.flatnonzero(present)
    if held.size == 0:
        return 0.0
    logits = vectors[held].astype(np.float64) @ weight.astype(np.float64).T
    if bias is not None:
        logits += bias.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    entropy = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(held.size), held]
    return float(entropy.mean())


def _penalised(costs: Costs, stay: Stay) -> Costs:
    return np.where(stay, 1.0 + 2.0 * np.abs(costs).sum() + np.abs(costs), costs)


def _strands_last(row: int, column: int, free: list[int], stay: Stay) -> bool:
    """Return whether the last row would have to stay at its client if `row` took `column`."""
    if len(free) != 2:
        return False
    rest = free[0] if free[1] == column else free[1]
    return bool(stay[row + 1, rest])
