"""Methods by name (``strategies/NAME.py`` holds the class NAME in lower case), their objectives and networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import key
from fedcross.core.settings import Settings, find
from fedcross.strategies.method import Method
from fedcross.strategies.objective import Objective


def method_class(name: str) -> type[Method]:
    """Return the method class of module ``strategies.NAME``.

    Raises
    ------
    ConfigError
        If there is no such module, or not exactly one such class in it.
    """
    module = find("fedcross.strategies", name, "method")
    found = {
        value
        for attribute, value in vars(module).items()
        if attribute.lower() == name.replace("_", "") and isinstance(value, type) and issubclass(value, Method)
    }
    if len(found) != 1:
        why = "several Method classes" if found else "no Method class"
        raise ConfigError(f"method.name={name!r}: {module.__name__} has {why} named like it.")
    return found.pop()


def objective_of(method: Method, name: str, params: Settings) -> Objective:
    """Return what clients minimise: the method's ``own`` objective or, by `name`, that of another method.

    Raises
    ------
    ConfigError
        If the server half of `method` does not send what the objective needs, or expects something else back.
    """
    own = method.objective()
    if name == "own":
        return own
    other = method_class(name)(params)
    found, server = other.objective(), type(method).__name__
    if lacking := sorted(found.needs - own.needs):
        raise ConfigError(
            f"objective={name}: needs {', '.join(lacking)} from the server, which {server} does not send."
        )
    if found.sends != own.sends:
        raise ConfigError(
            f"objective={name}: clients would send {', '.join(sorted(found.sends)) or 'nothing'} beside their model; "
            f"{server} expects {', '.join(sorted(own.sends)) or 'nothing'}."
        )
    if type(other).network is not type(method).network:
        raise ConfigError(f"objective={name}: trains another network than {server}. Choose objective=own.")
    return found


def build_network(method: Method[Any, Any], model: nn.Module, seed: int) -> nn.Module:
    """Return the network that `method` trains; the weights that it adds to `model` depend on `seed` alone.

    They get the dtype of the trained weights of `model`. PyTorch's global CPU generator is restored afterwards.
    """
    parts = [name for name, _ in model.named_children()]
    if method.objective().halves and not {"features", "classifier"} <= set(parts):
        raise ConfigError(
            f"method {type(method).__name__}: needs a model with features and classifier, {type(model).__name__} has "
            f"{', '.join(parts) or 'no parts'}. docs/own-model.md shows how to write them; fedavg, fedprox, scaffold "
            "and fedcross do without."
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, "method model"))
        own = list(model.parameters())
        built = method.network(model)
    known = set(map(id, own))
    dtype = next((one.dtype for one in own if one.requires_grad), None)
    for added in (one for one in built.parameters() if dtype is not None and id(one) not in known):
        added.data = added.data.to(dtype)
    return built
