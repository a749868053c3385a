"""Typed settings: the frozen base class of every group of settings, and lookup of modules by name.

Every task, model and method that a configuration can choose is a module with the same name as its YAML file. The module
holds a ``Params`` class derived from :class:`Settings`; there is no registry.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedcross.core.errors import ConfigError, nearest
from fedcross.core.faults import MISSING, required, sentences, truths
from fedcross.core.paths import room
from fedcross.core.plugins import extra_folders


class Settings(BaseModel):
    """Frozen, typed settings; unknown names and values out of range are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def parse(kind: type[S], values: Mapping[str, Any], where: str, faults: list[str]) -> S | None:
    """Build `kind` from `values`; append one sentence per fault to `faults` and return None if there are any.

    Parameters
    ----------
    kind : type
        The settings class.
    values : mapping
        Plain values as they come out of the configuration.
    where : str
        The configuration group, for messages: ``method``, ``task``, ...
    faults : list of str
        Receives the faults.
    """
    found = {name: required(kind, name, where) for name, value in values.items() if value == MISSING}
    found |= truths(kind, values, where)
    try:
        made = kind.model_validate(dict(values))
    except ValidationError as error:
        found = sentences(kind, values, where, error) | found
        made = None
    faults += found.values()
    return None if found else made


def find(package: str, name: str, group: str) -> ModuleType:
    """Import ``package.name``, the module that implements `name` of configuration group `group`.

    Raises
    ------
    ConfigError
        If there is no such module; the message names the nearest one.
    """
    if not name.isidentifier() or importlib.util.find_spec(f"{package}.{name}") is None:
        folders = (room("conf"), *map(Path, extra_folders("conf")))
        known = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
        raise ConfigError(f"{group}.name={name!r}: there is no such {group}. {nearest(name, known)}")
    return importlib.import_module(f"{package}.{name}")
