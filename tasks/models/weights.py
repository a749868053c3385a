"""A network's weights as arrays: tied weights once, frozen weights apart from trained ones, supported dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedcross.core.errors import ConfigError

Arrays = dict[str, npt.NDArray[Any]]
#: Float dtypes that the server can compute with and numpy supports.
DTYPES = (torch.float32, torch.float64)


def tied(module: nn.Module) -> dict[str, str]:
    """Return the names of `module`'s ``state_dict`` whose tensor has an earlier name too -> that earlier name.

    One tensor in two places (an embedding that is also the classifier) is trained, sent and mixed once.
    """
    names = module.state_dict().keys()
    first: dict[int, str] = {}
    found = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        earlier = first.setdefault(id(tensor), name)
        if earlier != name and name in names:
            found[name] = earlier
    return found


def trainable(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are trained: those that require gradients."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def arrays_of(module: nn.Module) -> Arrays:
    """Return `module`'s ``state_dict`` as arrays, in its order, each tensor once; views on the CPU."""
    again = tied(module)
    return {n: tensor.detach().cpu().numpy() for n, tensor in module.state_dict().items() if n not in again}


def every_name(arrays: Mapping[str, npt.NDArray[Any]], again: Mapping[str, str]) -> Arrays:
    """Return `arrays` with tied tensors under all their names, as a ``state_dict`` has them; `again` as of `tied`."""
    return {**arrays, **{name: arrays[earlier] for name, earlier in again.items() if earlier in arrays}}


def load_arrays(module: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Overwrite the weights of `module` by `arrays`, as ``load_state_dict``; a tied tensor needs one of its names."""
    complete = every_name(arrays, tied(module))
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in complete.items()})


def check_weights(module: nn.Module) -> None:
    """Raise a ConfigError unless all float entries of `module` are float32, or all float64, and some are trained."""
    floats = {n: t.dtype for n, t in module.state_dict().items() if t.dtype.is_floating_point}
    for name, dtype in floats.items():
        if dtype not in DTYPES:
            cure = "Build the network in float32; train.precision=bfloat16 computes in bfloat16 all the same."
            raise ConfigError(f"model: {name} is {_short(dtype)}, weights must be float32 or float64. {cure}")
    if len(set(floats.values())) > 1:
        first, dtype = next(iter(floats.items()))
        other = next(name for name in floats if floats[name] != dtype)
        found = f"{first} is {_short(dtype)}, {other} is {_short(floats[other])}"
        raise ConfigError(f"model: {found}. Give all weights one dtype.")
    if not trainable(module):
        raise ConfigError("model: no parameter requires gradients, so there is nothing to train. Unfreeze some.")


def has_statistics(module: nn.Module) -> bool:
    """Return whether `module` sends numbers that are not trained, as the statistics of batch normalisation are."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return any(t.is_floating_point() for name, t in module.state_dict().items() if name not in parameters)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
