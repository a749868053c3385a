"""Assigns each model its next client from a matrix of costs: minimum-cost assignment, greedy, literal, random.

Rows are models, columns are clients: ``costs[i, j]``, finite, is the cost of training model i at client j. ``stay[i,
j]`` marks the client that trained model i last. Every model moves to another client wherever that is possible.
"""

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
    """
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(_penalised(costs, stay))[1], dtype=np.int64)


def greedy(costs: Costs, stay: Stay) -> Hosts:
    """Return each row's column: row after row takes the cheapest column that is still free.

    A row skips a column if the last row would then have to stay at its client. Of equal costs the lower column wins.
    """
    penalised, free, hosts = _penalised(costs, stay), list(range(len(costs))), list[int]()
    for row in range(len(costs)):
        ordered = sorted(free, key=lambda column: (penalised[row, column], column))
        if len(free) == 2 and stay[row + 1, ordered[1]]:
            ordered.sort(key=lambda column: bool(stay[row + 1, sum(free) - column]))  # the last gets the other
        hosts.append(ordered[0])
        free.remove(ordered[0])
    return np.array(hosts, np.int64)


def literal(costs: Costs, stay: Stay) -> Hosts:
    """Return each row's cheapest column: several models may meet at one client, and a client may get none."""
    return np.asarray(_penalised(costs, stay).argmin(axis=1), dtype=np.int64)


def random(stay: Stay, generator: np.random.Generator) -> Hosts:
    """Return a uniform draw among the permutations in which no model stays (derangements, if all models are apart)."""
    rows, best = np.arange(len(stay)), None
    for _ in range(TRIES):
        drawn = generator.permutation(len(stay))
        if best is None or stay[rows, drawn].sum() < stay[rows, best].sum():
            best = drawn
        if not stay[rows, best].any():
            break
    return np.asarray(best, np.int64)


MATCHINGS: dict[str, Callable[[Costs, Stay], Hosts]] = {"assignment": assignment, "greedy": greedy, "literal": literal}


def consistency(
    weight: NDArray[np.generic], bias: NDArray[np.generic] | None, vectors: NDArray[np.floating], present: Stay
) -> float:
    """Return v_ij = CE(H_i(U_j), Y_j): how well classifier i recognises the prototypes of client j, in nats.

    H_i has `weight` (classes, embedding) and perhaps `bias` (classes,); `vectors` (classes, embedding) are U_j. The
    mean is over the classes that client j holds, `present` (classes,); 0 without any.
    """
    held = np.flatnonzero(present)
    if held.size == 0:
        return 0.0
    logits = vectors[held].astype(np.float64) @ weight.astype(np.float64).T
    logits += 0.0 if bias is None else bias.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    entropy = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(held.size), held]
    return float(entropy.mean())


def _penalised(costs: Costs, stay: Stay) -> Costs:
    return np.where(stay, 1.0 + 2.0 * np.abs(costs).sum() + np.abs(costs), costs)
