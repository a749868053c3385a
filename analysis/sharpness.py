"""Measures the sharpness of a loss at a point: the largest eigenvalue of its Hessian, and epsilon-sharpness.

Both take the loss as a function of one flat vector, so that tests can check them against exact values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]


def hessian_times(loss: Loss, point: Tensor, vector: Tensor) -> Tensor:
    """Return the product of the Hessian of `loss` at `point` with `vector`, shapes (d,), by differentiating twice."""
    at = point.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
    (product,) = torch.autograd.grad(gradient @ vector, at)
    return product.detach()


def largest_eigenvalue(
    loss: Loss, point: Tensor, start: Tensor, steps: int = 50, tolerance: float = 1e-3
) -> tuple[float, Tensor]:
    """Return the largest (most positive) eigenvalue of the Hessian of `loss` at `point`, and its eigenvector.

    Parameters
    ----------
    loss : callable
        From a vector of shape (d,) to a scalar.
    point, start : Tensor, shape (d,)
        The point, and the initial vector of the power iteration (not orthogonal to the eigenvector).
    steps : int
        Most iterations; each costs two backward passes.
    tolerance : float
        Relative change of the estimate at which the iteration ends.

    Notes
    -----
    Power iteration finds the eigenvalue of largest magnitude. If that is negative, a second iteration on
    H - lambda I, whose eigenvalues are all at least 0, finds the largest.
    """

    def iterate(shift: float) -> tuple[float, Tensor]:
        vector, value = start / start.norm(), 0.0
        for _ in range(steps):
            product = hessian_times(loss, point, vector) - shift * vector
            before, value = value, float(vector @ product)
            norm = product.norm()
            if norm == 0:
                return shift, vector
            vector = product / norm
            if abs(value - before) <= tolerance * abs(value):
                break
        return value + shift, vector

    value, vector = iterate(0.0)
    return iterate(value) if value < 0 else (value, vector)


def epsilon_sharpness(loss: Loss, point: Tensor, epsilon: float = 1e-3, steps: int = 10) -> float:
    """Return 100 (max L - L(w)) / (1 + L(w)), the maximum over the box |w'_i - w_i| <= epsilon (|w_i| + 1), in percent.

    The definition is Keskar et al.'s (2017). `steps` steps along the sign of the gradient approximate the maximum, each
    half the width of the box and clipped to it: exact for a linear loss, otherwise a lower bound.
    """
    reach = epsilon * (point.abs() + 1)
    with torch.no_grad():
        here = float(loss(point))
    highest, at = here, point.detach().clone()
    for _ in range(steps):
        at = at.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(loss(at), at)
        moved = at.detach() + reach / 2 * gradient.sign()
        at = torch.minimum(torch.maximum(moved, point - reach), point + reach)
        with torch.no_grad():
            highest = max(highest, float(loss(at)))
    return 100 * (highest - here) / (1 + here)
