"""Class prototypes: means of embeddings, and a loss that compares embeddings with them.

A set of prototypes is a group of arrays: ``vectors`` (classes, embedding), 0 for a class without one, and ``present``,
bool (classes,). The losses run under ``torch.func.vmap``; no gradient flows into prototypes.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedcross.strategies.objective import Batch, Net, Tensors
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.inputs import Inputs

NEVER = -1e30  # Logit of a class without a prototype; finite, so that gradients stay finite too.
CHUNK = 1000  # Examples at a time when prototypes are computed.


@torch.no_grad()
def class_means(net: Net, params: Tensors, buffers: Tensors, x: Tensor | Inputs, y: Tensor, classes: int) -> Tensors:
    """Return the prototypes of inputs `x` (n, ...), without augmentation, and labels `y` (n,), in evaluation mode."""
    features = [net.features(params, buffers, x[i : i + CHUNK], train=False) for i in range(0, len(x), CHUNK)]
    members = functional.one_hot(y, classes)
    counts = members.sum(dim=0)
    # A matrix product, not index_add: its sum has one order on a GPU too.
    sums = members.to(features[0].dtype).T @ torch.cat(features)
    return {"vectors": sums / counts.clamp(min=1).unsqueeze(1), "present": counts > 0}


def credible(counts: NDArray[Any], examples: int) -> NDArray[np.float64]:
    """Return the label counts (classes,) that a client sent, scaled to its `examples`, which the defence may cap.

    Zeros if one is negative or all are 0.
    """
    found = counts.astype(np.float64)  # a sum of int64 could overflow
    return found * (examples / found.sum()) if found.min() >= 0 and found.any() else 0 * found


def average(prototypes: list[Arrays]) -> Arrays:
    """Return each class's unweighted mean over the clients that hold it (FedCT Eq. 2)."""
    holders = np.sum([p["present"] for p in prototypes], axis=0)
    total = np.sum([np.where(p["present"][:, None], p["vectors"], 0) for p in prototypes], axis=0, dtype=np.float64)
    vectors = (total / np.maximum(holders, 1)[:, None]).astype(prototypes[0]["vectors"].dtype)
    return {"vectors": vectors, "present": holders > 0}


def fuse(overall: Arrays, local: Arrays, share: float) -> Arrays:
    """Return ``share U_g + (1 - share) U_l`` per class; a class that only one of the two has comes from that one."""
    here, there = local["present"][:, None], overall["present"][:, None]
    one, other = local["vectors"], overall["vectors"]
    mixed = np.where(here & there, share * other + (1 - share) * one, np.where(here, one, np.where(there, other, 0)))
    return {"vectors": mixed.astype(one.dtype), "present": overall["present"] | local["present"]}


def cosines(features: Tensor, vectors: Tensor, present: Tensor) -> Tensor:
    """Return cosines (batch, classes) of embeddings and prototypes, ``NEVER`` for classes without one."""
    similarity = functional.normalize(features, dim=1) @ functional.normalize(vectors, dim=1).T
    return torch.where(present, similarity, torch.full_like(similarity, NEVER))


def contrast(features: Tensor, y: Tensor, vectors: Tensor, present: Tensor, temperature: float) -> Tensor:
    """Return ``-log softmax_y(cos(f, u) / temperature)`` per example (batch,); 0 where class y has no prototype."""
    scores = functional.log_softmax(cosines(features, vectors, present) / temperature, dim=1)
    loss = -scores.gather(1, y.unsqueeze(1)).squeeze(1)
    return torch.where(present[y], loss, torch.zeros_like(loss))


def neighbours(batch: Batch) -> Tensor:
    """Return each row's neighbour, to mix with, int64 (batch,): the next real row, the first after the last.

    The trainer shuffles the examples each epoch, so neighbours are a uniform random pairing.
    """
    n = len(batch.y)
    if batch.mask is None:
        return (torch.arange(n, device=batch.y.device) + 1) % n
    real = batch.mask > 0
    order = torch.argsort(real.to(torch.int8), descending=True, stable=True)
    return order[torch.remainder(torch.cumsum(real, dim=0), real.sum().clamp(min=1))]
