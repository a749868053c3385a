"""Averages of models and of rows of a pool, and which rounds they are over."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from fedcross.strategies.pool.mixing import mixed_integers
from fedcross.strategies.pool.pool import Array, Arrays


def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Return ``sum_i weights[i] * models[i] / sum(weights)``, entry by entry, newly allocated.

    There is one model at least, all with the same names, shapes and dtypes, and one weight of 0 or more for each.
    Floating entries keep their dtype, integer ones are truncated (:func:`strategies.pool.mixing.mixed_integers`).
    """
    total = float(sum(weights))
    shares = [w / total for w in weights]
    mean: Arrays = {}
    for name, first in models[0].items():
        if first.dtype.kind == "f":
            accumulated = np.multiply(first, shares[0], dtype=first.dtype)
            for model, share in zip(models[1:], shares[1:]):
                accumulated += np.multiply(model[name], share, dtype=first.dtype)
            mean[name] = np.asarray(accumulated)
        else:
            values = np.stack([model[name] for model in models]).reshape(len(models), -1)
            mean[name] = mixed_integers(values, np.array([shares])).reshape(first.shape)
    return mean


def move(mean: Arrays, start: Arrays, step: float, names: Iterable[str]) -> None:
    """Set ``mean = start + step (mean - start)`` for these entries; at step 1 they stay to the bit."""
    for name in names if step != 1 else ():
        way = np.multiply(np.subtract(mean[name], start[name]), step)
        mean[name] = np.asarray(np.add(start[name], way), dtype=start[name].dtype)


def squared_distance(one: Mapping[str, Array], other: Mapping[str, Array], names: Iterable[str]) -> float:
    """Return ``||one - other||^2`` over the entries `names`, in float64; an entry that `other` lacks is 0."""
    ways = (np.subtract(one[name], other.get(name, 0.0), dtype=np.float64).reshape(-1) for name in names)
    return float(sum(way @ way for way in ways))


def effective_steps(steps: int, momentum: float) -> float:
    """Return how many plain steps `steps` steps with `momentum` are worth, for a constant gradient (SCAFFOLD, FedNova).

    Step s moves the model by ``lr sum_{i<=s} momentum^(s-i) g_i``, so g_i enters the whole way with weight
    ``(1 - momentum^(steps-i+1)) / (1 - momentum)``. The weights add up to
    ``(steps - momentum (1 - momentum^steps) / (1 - momentum)) / (1 - momentum)``.
    """
    tail = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - tail) / (1 - momentum)


def first_late(rounds: int, start: float) -> int:
    """Return the number, from 1, of the first round after a share `start` of all planned `rounds` (SWA, IMA).

    `start` is taken as it is written: .29 of 100 rounds are 29, while the float's product is a little less.
    """
    return int(Fraction(str(start)) * rounds) + 1
