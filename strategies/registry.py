"""Methods by name (``strategies/NAME.py`` holds the class NAME in lower case), their objectives and networks."""

from typing import Any

from torch import nn

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import global_generators
from fedcross.core.settings import Settings, find
from fedcross.strategies.method import Method
from fedcross.strategies.objective import Objective


def method_class(name: str) -> type[Method]:
    """Return the method class of module ``strategies.NAME``; a ConfigError if there is not exactly one."""
    module, own = find("fedcross.strategies", name, "method"), name.replace("_", "")
    named = [value for attribute, value in vars(module).items() if attribute.lower() == own]
    found = {value for value in named if isinstance(value, type) and issubclass(value, Method)}
    if len(found) != 1:
        why = "several Method classes" if found else "no Method class"
        raise ConfigError(f"method.name={name!r}: {module.__name__} has {why} named like it.")
    return found.pop()


def objective_of(method: Method, name: str, params: Settings) -> Objective:
    """Return what clients minimise: the method's ``own`` objective or, by `name`, that of another method.

    A ConfigError says that the server half of `method` does not send what it needs, or expects something else back.
    """
    own = method.objective()
    if name == "own":
        return own
    other, server = method_class(name)(params), type(method).__name__
    found = other.objective()
    if lacking := sorted(found.needs - own.needs):
        why = f"needs {', '.join(lacking)} from the server, which {server} does not send."
    elif found.sends != own.sends:
        sent, wanted = (", ".join(sorted(one.sends)) or "nothing" for one in (found, own))
        why = f"clients would send {sent} beside their model; {server} expects {wanted}."
    elif type(other).network is not type(method).network:
        why = f"trains another network than {server}. Choose objective=own."
    else:
        return found
    raise ConfigError(f"objective={name}: {why}")


def build_network(method: Method[Any, Any], model: nn.Module, seed: int) -> nn.Module:
    """Return the network that `method` trains; the weights that it adds to `model` depend on `seed` alone.

    They get the dtype of the trained weights of `model`. The global generators are restored afterwards.
    """
    parts = [name for name, _ in model.named_children()]
    if method.objective().halves and not {"features", "classifier"} <= set(parts):
        raise ConfigError(
            f"method {type(method).__name__}: needs a model with features and classifier, {type(model).__name__} has "
            f"{', '.join(parts) or 'no parts'}. docs/own-model.md shows how to write them."
        )
    own = list(model.parameters())
    with global_generators(seed, "method model"):
        built = method.network(model)
    known, trained = set(map(id, own)), [one.dtype for one in own if one.requires_grad]
    for added in (one for one in built.parameters() if trained and id(one) not in known):
        added.data = added.data.to(trained[0])
    return built
