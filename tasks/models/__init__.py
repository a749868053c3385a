"""Models, one module each: ``Params`` (settings) and ``build(params, task, width)``, described in :mod:`tasks.base`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import ConfigError
from fedcross.core.paths import extra_folders
from fedcross.core.randomness import key
from fedcross.core.settings import Settings, find, parse
from fedcross.tasks.base import Task

if TYPE_CHECKING:
    from fedcross.tasks.models._split import Split
    from fedcross.tasks.models.width import Corners, Hidden, Width

__path__ += extra_folders("tasks.models")


def create(
    name: str, settings: Settings | Mapping[str, Any], task: Task, seed: int, width: Width | None = None
) -> Split:
    """Build model `name` (a module here) for `task` on the CPU; the same arguments give the same weights.

    `settings` are the module's ``Params``, or plain values for them (an entry ``name`` is passed over). At a `width`
    the weights are the leading corner of the full network's. torch's global generator is left as it was; dropout layers
    have states that depend on `seed`. A ConfigError says that there is no such model, a setting is wrong, or that the
    model does not fit the task or has no widths.
    """
    from fedcross.tasks.models.dropout import seed_dropout
    from fedcross.tasks.models.width import Hidden, load_corner

    module, params = _found(name, settings)
    model = _built(module, params, task, seed, Hidden())
    if width is not None and width.ratio < 1:
        full, model = model, _built(module, params, task, seed, Hidden(width))
        load_corner(model, full)
    seed_dropout(model, key(seed, "dropout"))
    return model


def corners(name: str, settings: Settings | Mapping[str, Any], task: Task) -> Corners:
    """Return the shapes of model `name` at every width; errors as of :func:`create`."""
    from fedcross.tasks.models.width import Corners, Hidden

    module, params = _found(name, settings)
    counted = Hidden()
    _built(module, params, task, 0, counted)
    return Corners.of(lambda width: _built(module, params, task, 0, Hidden(width)), tuple(counted.channels))


def _found(name: str, settings: Settings | Mapping[str, Any]) -> tuple[ModuleType, Settings]:
    """Return the module of model `name` and its settings."""
    module = find("fedcross.tasks.models", name, "model")
    if not hasattr(module, "build"):
        raise ConfigError(f"model.name={name!r}: module tasks.models.{name} is no model. Choose a file of conf/model.")
    if isinstance(settings, Settings):
        return module, settings
    faults: list[str] = []
    params = parse(module.Params, {item: value for item, value in settings.items() if item != "name"}, "model", faults)
    if params is None:
        raise ConfigError(faults)
    return module, params


def _built(module: ModuleType, params: Settings, task: Task, seed: int, width: Hidden) -> Split:
    """Return the network of `module` at `width`, with initial weights from `seed`."""
    import torch

    from fedcross.tasks.models.weights import check_weights

    given: dict[str, Any] = {"width": width} if "width" in inspect.signature(module.build).parameters else {}
    if width < 1 and not given:
        one = f"model {module.__name__.rpartition('.')[2]!r} has one width: its build takes no argument width"
        raise ConfigError(f"{one}. Choose another model, or a method without method.widths.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, "model"))
        model: Split = module.build(params, task, **given)
    check_weights(model)
    return model
