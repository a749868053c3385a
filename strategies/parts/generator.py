"""FedGen's generator of embeddings and its losses, as functions of its weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedcross.core.randomness import stream
from fedcross.strategies.objective import Tensors, as_tensors
from fedcross.strategies.wire.records import Arrays

#: Parameters that Adam updates; the server also sends the running statistics of the batch normalisation.
TRAINED = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "latent.weight", "latent.bias")
STATISTICS = ("norm.mean", "norm.variance")
EPSILON = 1e-5  # of the batch normalisation, PyTorch's default
RATES = (0.9, 0.999)  # of Adam's moments
ADAM_EPSILON = 1e-8
FORGET = 0.1  # weight of a new batch in the running statistics, PyTorch's default


def create(noise: int, classes: int, hidden: int, embedding: int, seed: int) -> Tensors:
    """Return a new generator: linear layers uniform in +-1/sqrt(inputs) as PyTorch's, normalisation the identity."""

    def linear(name: str, outputs: int, inputs: int) -> Arrays:
        draws = stream(seed, f"fedgen {name}")
        bound = 1 / np.sqrt(inputs)
        return {
            f"{name}.weight": draws.uniform(-bound, bound, (outputs, inputs)).astype(np.float32),
            f"{name}.bias": draws.uniform(-bound, bound, outputs).astype(np.float32),
        }

    norm = {"norm.weight": 1.0, "norm.bias": 0.0, "norm.mean": 0.0, "norm.variance": 1.0}
    arrays = {
        **linear("hidden", hidden, noise + classes),
        **{name: np.full(hidden, value, np.float32) for name, value in norm.items()},
        **linear("latent", embedding, hidden),
    }
    return as_tensors(arrays)


def generate(generator: Tensors, noise: Tensor, labels: Tensor, train: bool) -> Tensor:
    """Return embeddings (b, embedding) of `noise` (b, noise) and one-hot `labels` (b, classes).

    In training mode the batch's own statistics normalise, and the running ones are replaced in the dictionary.
    """
    hidden = functional.linear(torch.cat([noise, labels], 1), generator["hidden.weight"], generator["hidden.bias"])
    if train:
        mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
        unbiased = variance.detach() * (len(hidden) / (len(hidden) - 1))
        generator["norm.mean"] = torch.lerp(generator["norm.mean"], mean.detach(), FORGET)
        generator["norm.variance"] = torch.lerp(generator["norm.variance"], unbiased, FORGET)
    else:
        mean, variance = generator["norm.mean"], generator["norm.variance"]
    scaled = (hidden - mean) * torch.rsqrt(variance + EPSILON) * generator["norm.weight"] + generator["norm.bias"]
    return functional.linear(torch.relu(scaled), generator["latent.weight"], generator["latent.bias"])


def teacher_loss(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor, shares: Tensor) -> Tensor:
    """Return ``mean_b sum_k shares[y_b, k] CE(weight_k z_b + bias_k, y_b)``.

    `z` (b, embedding), `y` (b,); the clients' heads `weight` (k, classes, embedding) and `bias` (k, classes); `shares`
    (classes, k).
    """
    scores = torch.einsum("be,kce->bkc", z, weight) + bias
    logs = functional.log_softmax(scores, 2)
    own = logs.gather(2, y[:, None, None].expand(-1, logs.shape[1], 1))[:, :, 0]
    return -(shares[y] * own).sum(1).mean()


def diversity_loss(noise: Tensor, z: Tensor) -> Tensor:
    """Return ``exp(-mean_{b,c} mse(noise_b, noise_c) * mae(z_b, z_c))``, in (0, 1].

    It is small if different noise gives different embeddings.
    """
    apart = (noise[:, None] - noise[None]).square().mean(2)
    spread = (z[:, None] - z[None]).abs().mean(2)
    return torch.exp(-(apart * spread).mean())


def one_hot(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return one-hot rows (b, classes) of `y` (b,), also under vmap, in the dtype of `like`."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)


def adam(weights: Tensors, slopes: Tensors, moments: Tensors, number: int, lr: float, decay: float) -> None:
    """Take step `number`, from 1, of Adam (Kingma and Ba 2015) with L2 in the gradient, as ``torch.optim.Adam``.

    `weights` get new tensors. `moments` hold ``first.NAME`` and ``second.NAME``; missing ones are 0. PyTorch's own Adam
    imports its compiler, which takes seconds.
    """
    for name, slope in slopes.items():
        weight = weights[name].detach()
        gradient = slope + decay * weight
        first, second = (moments.setdefault(f"{m}.{name}", torch.zeros_like(weight)) for m in ("first", "second"))
        first.lerp_(gradient, 1 - RATES[0])
        second.mul_(RATES[1]).addcmul_(gradient, gradient, value=1 - RATES[1])
        size = (second / (1 - RATES[1] ** number)).sqrt_().add_(ADAM_EPSILON)
        weights[name] = weight - (lr / (1 - RATES[0] ** number)) * (first / size)
