"""What momentum makes of a client's steps, for methods that divide by their number (SCAFFOLD, FedNova)."""

from __future__ import annotations


def effective_steps(steps: int, momentum: float) -> float:
    """Return how many plain steps `steps` steps with `momentum` are worth, for a constant gradient.

    Step s moves the model by ``lr sum_{i<=s} momentum^(s-i) g_i``, so g_i enters the whole way with weight
    ``(1 - momentum^(steps-i+1)) / (1 - momentum)``. The weights add up to
    ``(steps - momentum (1 - momentum^steps) / (1 - momentum)) / (1 - momentum)``.
    """
    tail = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - tail) / (1 - momentum)
