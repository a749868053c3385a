"""A network of the user's own, by its import path: ``model=package.module:Class model.hidden=64``.

``path`` names a ``torch.nn.Module`` class or a function that returns a module. It gets the settings below ``model`` as
arguments. Arguments called ``classes``, ``shape``, ``vocabulary`` and ``task`` come from the task. An argument
``width=1.0`` takes part in widths: ``width(64)``, or ``ceil(width * 64)``, is the number of a hidden layer's channels.
A class of Hugging Face transformers gets a configuration instead (:mod:`tasks.models._huggingface`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_validator
from torch import nn

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.paths import own_object
from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._fitting import check_fit
from fedcross.tasks.models._huggingface import config_faults, is_huggingface, with_lora, wrapped
from fedcross.tasks.models.dropout import count_dropout
from fedcross.tasks.models.width import Hidden

#: Arguments that the task gives, where the class has them and no setting does.
FROM_TASK = ("task", "classes", "shape", "vocabulary")


class Params(Settings):
    """Which class, and its arguments.

    Attributes
    ----------
    path : str
        ``package.module:Class``.
    lora : dict, optional
        Arguments of ``peft.LoraConfig``: puts LoRA adapters into the network. To train them alone, set ``train.only``.
    """

    model_config = ConfigDict(extra="allow")

    path: str
    lora: dict[str, Any] | None = Field(default=None)

    @model_validator(mode="after")
    def _check(self) -> Params:
        """Import the class and compare the settings with its arguments, so that a fault shows before the run."""
        if not self.path:  # the YAML file's; `build` asks for one
            return self
        target = own_object(self.path, "model.path")
        given = self.model_extra or {}
        faults = config_faults(target, given) if is_huggingface(target) else _argument_faults(target, self.path, given)
        if faults:
            raise ConfigError(faults)
        return self


def _argument_faults(target: Any, path: str, given: Mapping[str, Any]) -> list[str]:
    if not callable(target) or (inspect.isclass(target) and not issubclass(target, nn.Module)):
        name = getattr(target, "__name__", f"a {type(target).__name__}")
        return [f"model.path={path!r}: {name} is no torch.nn.Module. Name such a class, or a function that makes one."]
    known = inspect.signature(target).parameters
    named = {n: p for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    settable = [name for name in named if name not in FROM_TASK] or ["no settings"]
    unknown = [] if any(p.kind is p.VAR_KEYWORD for p in known.values()) else [n for n in given if n not in named]
    faults = [f"model.{name}: {path} has no such argument. {nearest(name, settable)}" for name in unknown]
    return faults + [
        f"model.{name}: {path} needs this argument. Set model.{name}=VALUE."
        for name, p in named.items()
        if p.default is p.empty and name not in given and name not in FROM_TASK
    ]


def build(params: Params, task: Task, width: Hidden) -> nn.Module:
    """Return the network that `params` names, for the inputs and classes of `task`.

    Layers ``nn.Dropout`` are replaced by counter-based ones of the same probability. A ConfigError says that the class
    raises an error, has one width, or does not fit the task (:func:`check_fit`).
    """
    target: Callable[..., Any] = own_object(params.path, "model.path")
    where, given = f"model.path={params.path!r}", dict(params.model_extra or {})
    known = inspect.signature(target).parameters
    if "width" in known and "width" not in given and known["width"].default == 1:
        given["width"] = width
    elif width < 1:
        cure = "Add one, or choose a method without method.widths."
        raise ConfigError(f"{where} has one width: it takes no argument width=1.0. {cure}")
    if is_huggingface(target):
        network = wrapped(target, given, task, params.lora)
    else:
        facts = {"task": task, **{name: getattr(task, name) for name in FROM_TASK[1:]}}
        network = _constructed(target, where, {name: facts[name] for name in FROM_TASK if name in known} | given)
        network = network if params.lora is None else with_lora(network, params.lora)
    count_dropout(network)
    check_fit(network, task, where)
    return network


def _constructed(target: Callable[..., Any], where: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        network = target(**arguments)
    except Exception as error:  # a user's class can raise anything
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name != "task")
        call = f"{getattr(target, '__name__', target)}({shown})"
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {call} raised {said}. Correct the class or its settings.") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{where}: returned a {type(network).__name__}, not a torch.nn.Module.")
    return network
