"""Losses that several objectives are made of. All run under ``torch.func.vmap``."""

from torch import Tensor
from torch.nn import functional

from fedcross.strategies.objective import Batch, Net, Tensors


def each(scores: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of every example, shape (batch,)."""
    return functional.cross_entropy(scores, y, reduction="none")


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the real rows, a scalar."""
    return batch.mean(each(scores, batch.y))


def embedded(net: Net, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the embeddings (batch, e) and the cross-entropy, a scalar."""
    z = net.features(params, buffers, batch.x)
    return z, cross_entropy(net.classify(params, buffers, z), batch)


def divergence(scores: Tensor, teacher: Tensor, tau: float = 1.0) -> Tensor:
    """Return ``KL(softmax(teacher / tau) || softmax(scores / tau))`` of every example, shape (batch,)."""
    student, target = (functional.log_softmax(one / tau, dim=1) for one in (scores, teacher))
    return (target.exp() * (target - student)).sum(1)
