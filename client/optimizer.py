"""SGD, Adam and AdamW on the flat vector of a model, or on one vector per client; every visit starts anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcross.conf.schema import Train


@dataclass
class Moments:
    """What an optimiser keeps between steps.

    Attributes
    ----------
    first : Tensor, shape (..., p)
        SGD's momentum buffer, or Adam's mean of gradients.
    second : Tensor, shape (..., p) or (..., 0)
        Adam's mean of squared gradients; empty for SGD.
    """

    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, flat: Tensor, settings: Train, momentum: Tensor | None = None) -> Moments:
        """Return zeros for parameters `flat` (..., p); `momentum` replaces the first moment."""
        first = torch.zeros_like(flat) if momentum is None else momentum.clone()
        second = flat.new_zeros(*flat.shape[:-1], 0) if settings.optimizer == "sgd" else torch.zeros_like(flat)
        return cls(first, second)


def step(
    flat: Tensor,
    gradient: Tensor,
    moments: Moments,
    lr: float | Tensor,
    settings: Train,
    number: int = 0,
    term: Tensor | None = None,
) -> None:
    """Take one step of one model, or of many at once, in place, as ``torch.optim`` does; overwrites `gradient`.

    Parameters
    ----------
    flat, gradient : Tensor, shape (..., p)
        Parameters and the gradient of the loss.
    moments : Moments
        State of the optimiser.
    lr : float or Tensor
        Learning rate; a tensor () for one model, (..., 1) for one rate per model.
    settings : Train
        Optimiser, momentum, betas, weight decay, clipping.
    number : int
        Number of the step within the visit, from 0.
    term : Tensor, shape (..., p), optional
        The objective's own term of the gradient (:meth:`strategies.objective.Objective.gradient`).
    """
    if term is not None:
        gradient.add_(term)
    if settings.clip is not None:
        gradient.mul_((settings.clip / gradient.norm(dim=-1, keepdim=True)).clamp(max=1.0))
    if settings.weight_decay and settings.optimizer == "adamw":
        flat.mul_(1 - lr * settings.weight_decay)
    elif settings.weight_decay:
        gradient.add_(flat, alpha=settings.weight_decay)
    if settings.optimizer != "sgd":
        gradient = _adam(gradient, moments, settings, number + 1)
    elif settings.momentum:
        gradient = moments.first.mul_(settings.momentum).add_(gradient)
    if not isinstance(lr, Tensor):
        flat.add_(gradient, alpha=-lr)
    elif lr.dim() == 0:  # to the bit the same on a CPU, and no copy to the host on a GPU
        flat.addcmul_(gradient, lr, value=-1)
    else:
        flat.sub_(gradient * lr)


def _adam(gradient: Tensor, moments: Moments, settings: Train, steps: int) -> Tensor:
    """Return the direction of step `steps` (from 1) of Adam (Kingma and Ba 2015)."""
    one, two = settings.betas
    moments.first.lerp_(gradient, 1 - one)
    moments.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
    scale = (moments.second / (1 - two**steps)).sqrt_().add_(settings.eps)
    return (moments.first / (1 - one**steps)).div_(scale)
