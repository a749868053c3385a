"""A network of the user's own, by its import path: ``model=package.module:Class model.hidden=64``.

``path`` names a ``torch.nn.Module`` class or a function that returns a module. It gets the settings below ``model`` as
arguments. Arguments called ``classes``, ``shape``, ``vocabulary`` and ``task`` come from the task. A class of Hugging
Face transformers gets a configuration instead (:mod:`tasks.models._huggingface`). docs/own-model.md shows all of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_validator
from torch import nn

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.plugins import own_object
from fedcross.core.settings import Settings
from fedcross.tasks.base import Task
from fedcross.tasks.models._fitting import check_fit
from fedcross.tasks.models._huggingface import config_faults, is_huggingface, wrapped
from fedcross.tasks.models._lora import with_lora
from fedcross.tasks.models.dropout import count_dropout

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
    if inspect.isclass(target) and not issubclass(target, nn.Module):
        return [f"model.path={path!r}: {target.__name__} is no torch.nn.Module. Derive it from nn.Module."]
    if not callable(target):
        return [f"model.path={path!r}: this is a {type(target).__name__}. Name a class or a function."]
    known = inspect.signature(target).parameters
    named = {n: p for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    faults = []
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        settable = [name for name in named if name not in FROM_TASK] or ["no settings"]
        faults += [
            f"model.{name}: {path} has no such argument. {nearest(name, settable)}"
            for name in given
            if name not in named
        ]
    faults += [
        f"model.{name}: {path} needs this argument. Set model.{name}=VALUE."
        for name, p in named.items()
        if p.default is p.empty and name not in given and name not in FROM_TASK
    ]
    return faults


def build(params: Params, task: Task) -> nn.Module:
    """Return the network that `params` names, for the inputs and classes of `task`.

    Layers ``nn.Dropout`` are replaced by counter-based ones of the same probability, so that every engine drops the
    same elements.

    Raises
    ------
    ConfigError
        If the class raises an error, or what it builds does not fit the task (:func:`check_fit`).
    """
    target: Callable[..., Any] = own_object(params.path, "model.path")
    given = dict(params.model_extra or {})
    if is_huggingface(target):
        network = wrapped(target, given, task, params.lora)
    else:
        network = _constructed(target, params.path, given, task)
        if params.lora is not None:
            network = with_lora(network, params.lora)
    count_dropout(network)
    check_fit(network, task, params.path)
    return network


def _constructed(target: Callable[..., Any], path: str, given: dict[str, Any], task: Task) -> nn.Module:
    known = inspect.signature(target).parameters
    facts = {"task": task, "classes": task.classes, "shape": task.shape, "vocabulary": task.vocabulary}
    arguments = {name: value for name, value in facts.items() if name in known} | given
    try:
        network = target(**arguments)
    except Exception as error:  # a user's class can raise anything
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name != "task")
        raise ConfigError(
            f"model.path={path!r}: {path.partition(':')[2]}({shown}) raised {type(error).__name__}: {error}. Correct "
            "the class or its settings."
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model.path={path!r}: returned a {type(network).__name__}, not a torch.nn.Module.")
    return network
