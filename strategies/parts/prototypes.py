"""Class prototypes on the client: means of embeddings, and losses that compare embeddings with them.

All functions are pure and run under ``torch.func.vmap``. Prototypes are constants: no gradient flows into them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedcross.strategies.objective import Batch, Net, Tensors
from fedcross.tasks.inputs import Inputs

#: Logit of a class without a prototype; finite, so that gradients stay finite too.
NEVER = -1e30
#: Examples at a time when prototypes are computed.
CHUNK = 1000


@torch.no_grad()
def class_means(
    net: Net, params: Tensors, buffers: Tensors, x: Tensor | Inputs, y: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Return the mean embedding of each class (classes, embedding) and which classes have examples, bool (classes,).

    In evaluation mode, on inputs `x` (n, ...) without augmentation and labels `y` (n,). A class without examples has 0.
    """
    features = [net.features(params, buffers, x[i : i + CHUNK], train=False) for i in range(0, len(x), CHUNK)]
    members = functional.one_hot(y, classes)
    counts = members.sum(dim=0)
    # A matrix product, not index_add: its sum has one order on a GPU too.
    sums = members.to(features[0].dtype).T @ torch.cat(features)
    return sums / counts.clamp(min=1).unsqueeze(1), counts > 0


def cosines(features: Tensor, vectors: Tensor, present: Tensor) -> Tensor:
    """Return cosines (batch, classes) of embeddings and prototypes, ``NEVER`` for classes without one."""
    similarity = functional.normalize(features, dim=1) @ functional.normalize(vectors, dim=1).T
    return torch.where(present, similarity, torch.full_like(similarity, NEVER))


def contrast(features: Tensor, y: Tensor, vectors: Tensor, present: Tensor, temperature: float) -> Tensor:
    """Return ``-log softmax_y(cos(f, u) / temperature)`` per example (batch,); 0 where class y has no prototype."""
    scores = functional.log_softmax(cosines(features, vectors, present) / temperature, dim=1)
    loss = -scores.gather(1, y.unsqueeze(1)).squeeze(1)
    return torch.where(present[y], loss, torch.zeros_like(loss))


def away(features: Tensor, y: Tensor, vectors: Tensor, strength: float) -> Tensor:
    """Return ``f + strength (f - u_y)``: embeddings pushed away from their own prototype, a harder positive."""
    return features + strength * (features - vectors[y])


def attend(features: Tensor, vectors: Tensor, present: Tensor, temperature: float, share: float) -> Tensor:
    """Return ``(1 - share) f + share a U``: embeddings moved towards an attention-weighted sum of prototypes.

    ``a = softmax(cos(f, u) / temperature)`` over the classes with a prototype.
    """
    attention = functional.softmax(cosines(features, vectors, present) / temperature, dim=1)
    return (1 - share) * features + share * (attention @ vectors)


def partners(batch: Batch) -> Tensor:
    """Return the index of each row's partner for mixing, int64 (batch,): the next real row, the first after the last.

    The trainer shuffles the examples each epoch, so neighbours are a uniform random pairing. Padding rows are never a
    partner.
    """
    n = len(batch.y)
    if batch.mask is None:
        return (torch.arange(n, device=batch.y.device) + 1) % n
    real = batch.mask > 0
    order = torch.argsort(real.to(torch.int8), descending=True, stable=True)
    place = torch.cumsum(real, dim=0) - 1
    following = torch.remainder(place + 1, real.sum().clamp(min=1))
    return order[following]
