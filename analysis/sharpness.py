"""Sharpness of a loss at a point: the largest eigenvalue of its Hessian, and epsilon-sharpness.

Both take the loss as a function of one flat vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]


def hessian_times(loss: Loss, point: Tensor, vector: Tensor) -> Tensor:
    """Return the product of the Hessian of `loss` at `point` with `vector`, shapes (d,)."""
    product: Tensor = torch.autograd.functional.vhp(loss, point, vector)[1]  # type: ignore[no-untyped-call]
    return product


def largest_eigenvalue(loss: Loss, point: Tensor, start: Tensor, tolerance: float = 1e-3) -> float:
    """Return the largest (most positive) eigenvalue of the Hessian of `loss` at `point`.

    Parameters
    ----------
    loss : callable
        From a vector of shape (d,) to a scalar.
    point, start : Tensor, shape (d,)
        The point, and the initial vector of Lanczos's method (scipy's ``eigsh``).
    tolerance : float
        Relative accuracy.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    def times(vector: object) -> object:
        return hessian_times(loss, point, torch.as_tensor(vector).to(point)).numpy()

    size = len(point)
    operator = LinearOperator((size, size), matvec=times, dtype=start.numpy().dtype)
    values = eigsh(operator, k=1, which="LA", v0=start.numpy(), tol=tolerance, return_eigenvectors=False)
    return float(values[0])


def epsilon_sharpness(loss: Loss, point: Tensor, epsilon: float = 1e-3, steps: int = 10) -> float:
    """Return 100 (max L - L(w)) / (1 + L(w)), the maximum over the box |w'_i - w_i| <= epsilon (|w_i| + 1), in percent.

    The definition is Keskar et al.'s (2017). `steps` steps along the sign of the gradient, each half the width of the
    box and clipped to it, approximate the maximum: exact for a linear loss, otherwise a lower bound.
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
