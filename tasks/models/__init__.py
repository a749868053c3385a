"""Models, one module each: ``Params`` (settings) and ``build(params, task)``, described in :mod:`tasks.base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from fedcross.core.errors import ConfigError
from fedcross.core.plugins import extra_folders
from fedcross.core.randomness import key
from fedcross.core.settings import Settings, find, parse
from fedcross.tasks.base import Task

if TYPE_CHECKING:
    from fedcross.tasks.models._split import Split

__path__ += extra_folders("tasks.models")


def create(name: str, settings: Settings | Mapping[str, Any], task: Task, seed: int) -> Split:
    """Build model `name` for `task` on the CPU; the same arguments give the same weights.

    Only the CPU's global generator is borrowed for the initial weights, and it is put back as it was. Dropout layers
    start from a state of their own that depends on `seed`; a trainer sets them anew at each visit
    (:func:`tasks.models.dropout.seed_dropout`).

    Parameters
    ----------
    name : str
        Module in ``tasks.models``, the name of a file in ``conf/model``.
    settings : Settings or mapping
        The module's ``Params``, or plain values to parse into them (an entry ``name`` is passed over).
    task : Task
        Its ``shape``, ``classes`` and ``vocabulary`` fix the first and the last layer.
    seed : int
        The run's seed, 0 or more.

    Returns
    -------
    Split
        Module with ``features``, ``classifier`` and ``embedding``, in training mode, float32 or float64.

    Raises
    ------
    ConfigError
        If there is no such model, a setting is wrong, the model does not fit the task's inputs, or its weights cannot
        be trained here (:func:`tasks.models.weights.check_weights`).
    """
    import torch

    from fedcross.tasks.models.dropout import seed_dropout
    from fedcross.tasks.models.weights import check_weights

    module = find("fedcross.tasks.models", name, "model")
    if not hasattr(module, "build"):
        raise ConfigError(f"model.name={name!r}: module tasks.models.{name} is no model. Choose a file of conf/model.")
    params: Settings | None
    if isinstance(settings, Settings):
        params = settings
    else:
        faults: list[str] = []
        values = {item: value for item, value in settings.items() if item != "name"}
        params = parse(module.Params, values, "model", faults)
        if params is None:
            raise ConfigError(faults)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, "model"))
        model = cast("Split", module.build(params, task))
    check_weights(model)
    seed_dropout(model, key(seed, "dropout"))
    return model
