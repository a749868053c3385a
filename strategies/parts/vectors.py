"""Vectors with one value for each parameter: directions of a step, and what a client keeps or the server sends."""

import torch
from torch import Tensor

from fedcross.strategies.objective import Tensors, Visit, as_arrays, as_tensors, flatten, unflatten
from fedcross.strategies.wire.records import Arrays

#: Added to the norm of a direction, so that a direction of zero stays zero.
TINY = 1e-16


def scaled(direction: Tensor, length: float) -> Tensor:
    """Return `direction` (p,), made `length` long: with the gradient, SAM's way to the point ``w + rho g/|g|``."""
    scale: Tensor = length / (torch.linalg.vector_norm(direction) + TINY)
    return direction * scale


def shifted(params: Tensors, way: Tensors) -> Tensors:
    """Return ``params + way``, entry by entry."""
    return {name: value + way[name] for name, value in params.items()}


def vector(arrays: Arrays, like: Tensors, group: str = "") -> Tensor:
    """Return the arrays ``GROUP.PARAMETER`` (``PARAMETER`` without a group) flat (p,), in the order of `like`."""
    prefix = f"{group}." if group else ""
    return flatten(as_tensors({name: arrays[prefix + name] for name in like}, like=next(iter(like.values()))))


def kept(visit: Visit, group: str = "", otherwise: Tensor | None = None) -> Tensor:
    """Return the vector (p,) that the client kept; at its first visit `otherwise`, zeros by default."""
    if visit.state:
        return vector(visit.state, visit.params, group)
    return torch.zeros_like(flatten(visit.params)) if otherwise is None else otherwise


def named(flat: Tensor, visit: Visit) -> Arrays:
    """Return a vector (p,) as arrays with the parameters' names and shapes."""
    return as_arrays(unflatten(flat.detach(), visit.params))


def keep(visit: Visit, **groups: Tensor) -> Arrays:
    """Return vectors (p,) as arrays to keep or to send, with the names ``GROUP.PARAMETER``."""
    parts = {group: named(flat, visit) for group, flat in groups.items()}
    return {f"{group}.{name}": array for group, arrays in parts.items() for name, array in arrays.items()}
