"""Composes Hydra overrides into one configuration; command line, server and clients all use :func:`composed`."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedcross.conf.shorthand import translated
from fedcross.core.errors import ConfigError, nearest
from fedcross.core.paths import PLUGIN_VARIABLE, extra_folders, named_folders, page, room
from fedcross.core.settings import join as join
from fedcross.core.settings import quote
from fedcross.core.settings import split as split

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

CONF = Path(__file__).resolve().parent
#: Packages to which a plug-in folder adds modules.
PLUGIN_PACKAGES = ("strategies", "tasks", "tasks.models", "tasks.partition")
#: Settings that only name folders. They are set after composition, so that command line, record and apps share one.
FOLDERS = ("output", "resume", "data_root")


class UnknownSettingError(ConfigError):
    """An override of a setting that does not exist; `name` is the setting."""

    def __init__(self, fault: str, name: str) -> None:
        super().__init__(fault)
        self.name = name


def by_name(name: str | int, table: Mapping[str | int, Any], otherwise: Any) -> Any:
    """Return the entry `name` of `table`, else `otherwise`: ``${by_name:${task.name},{cifar10: 5, cifar100: 1},1}``."""
    return table.get(name, otherwise)


def last_name(path: str | None, otherwise: str) -> str:
    """Return the last part of an import path: ``${last_name:${method.strategy},FedAdam}``; `otherwise` without one."""
    return re.split(r"[.:]", path)[-1] if path else otherwise


OmegaConf.register_new_resolver("by_name", by_name, replace=True)
OmegaConf.register_new_resolver("last_name", last_name, replace=True)


def plugin_folders() -> list[Path]:
    """Return the folders named in ``FEDCROSS_PATH``; a ConfigError names those that are missing."""
    folders = named_folders()
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{PLUGIN_VARIABLE}: no such folder {', '.join(missing)}. Correct or unset the variable.")
    return folders


def _shadows(folders: Sequence[Path]) -> list[str]:
    """Return a fault for every plug-in file with the name of a file of fedcross or of another plug-in folder."""
    homes = {package: room(package.split(".")[0]).joinpath(*package.split(".")[1:]) for package in PLUGIN_PACKAGES}
    places = [(home, package.replace(".", "/"), "*.py") for package, home in homes.items()]
    places += [(group, f"conf/{group.name}", "*.yaml") for group in CONF.iterdir() if group.is_dir()]
    faults = []
    for home, below, pattern in places:
        taken = {path.name: path for path in home.glob(pattern) if path.name != "__init__.py"}
        for path in (path for folder in folders for path in sorted((folder / below).glob(pattern))):
            if path.name in taken:
                faults.append(f"{path}: {taken[path.name]} has this name already. Rename yours.")
            elif path.name != "__init__.py":
                taken[path.name] = path
    return faults


def activate_plugins() -> list[str]:
    """Make the user's modules importable; return the Hydra overrides that make their YAML files visible."""
    if not (folders := plugin_folders()):
        return []
    if faults := _shadows(folders):
        raise ConfigError(faults)
    for package in PLUGIN_PACKAGES:
        search = importlib.import_module(f"fedcross.{package}").__path__
        search += [folder for folder in extra_folders(package) if folder not in search]
    search_path = ",".join(f"file://{folder / 'conf'}" for folder in folders if (folder / "conf").is_dir())
    return [f"hydra.searchpath=[{search_path}]"] if search_path else []


def environment() -> tuple[str, str]:
    """Return the environment variables on which a configuration depends."""
    return os.environ.get(PLUGIN_VARIABLE, ""), os.environ.get("FEDCROSS_DATA", "")


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return Hydra's composition of `overrides`, unresolved, with its node ``hydra``; every call gets a copy.

    A wrong override is a ConfigError with the nearest valid names.
    """
    chosen, folders = _split_folders(translated(overrides))
    config = copy.deepcopy(_composed(chosen, environment()))
    for name, value in folders.items():
        config[name] = value
    return config


@functools.lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...], variables: tuple[str, str]) -> DictConfig:  # noqa: ARG001 - part of the key
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    searchpath = activate_plugins()
    running = GlobalHydra.instance().hydra  # set while Hydra's own main runs this job
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            return hydra_compose("config", overrides=[*searchpath, *overrides], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        text = explain(str(error), overrides)
        if found := re.search(UNKNOWN, str(error)):
            raise UnknownSettingError(text, found.group(1)) from error
        raise ConfigError(text) from error
    finally:
        GlobalHydra.instance().hydra = running


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration for `overrides`, without Hydra's own settings; errors as of `composed`."""
    config = composed([override for override in overrides if not is_hydras(override)])
    names = [str(name) for name in config if name != "hydra"]
    return dict(zip(names, resolved(config, *names)))


def resolved(config: DictConfig, *names: str) -> list[Any]:
    """Return the plain values of settings such as ``hydra.run.dir``; None for one that does not exist."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = [OmegaConf.select(config, name) for name in names]
        return [OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for v in found]
    except OmegaConfBaseException as error:
        raise ConfigError(explain(str(error))) from error


def is_hydras(override: str) -> bool:
    """Return whether `override` sets one of Hydra's own settings, which a run neither records nor passes to Flower."""
    return override.lstrip("+~").startswith(("hydra.", "hydra/", "hydra="))


def _value(override: str) -> Override | None:
    """Return what Hydra reads in `override`; None if it cannot read it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        found: Override = OverridesParser.create().parse_overrides([override])[0]
    except HydraException:
        return None
    return found


def _split_folders(overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return `overrides` without those that set :data:`FOLDERS`, and the values of these."""
    chosen, folders = [], {}
    for override in overrides:
        name = override.partition("=")[0]
        read = _value(override) if name in FOLDERS else None  # Hydra reports what cannot be read
        if read is not None and not read.is_sweep_override():
            folders[name] = read.value()
        else:
            chosen.append(override)
    return tuple(chosen), folders


#: Hydra's words about an override of a setting that does not exist.
UNKNOWN = r"Could not override '([^']+)'"


def explain(message: str, overrides: Sequence[str] = ()) -> str:
    """Return Hydra's `message` about `overrides` as one sentence with the nearest valid name."""
    if found := re.search(r"Could not find '([\w-]+)/([^']+)'", message):
        group, name = found.groups()
        folders = [root / group for root in (CONF, *(f / "conf" for f in plugin_folders()))]
        files = [path.relative_to(folder) for folder in folders for path in folder.rglob("[!_]*.yaml")]
        known = sorted(path.with_suffix("").as_posix() for path in files)
        return f"{group}={name}: there is no such {group}. {nearest(name, known)}"
    if (found := re.search(UNKNOWN, message)) and "In '" not in message:
        return _unknown(found.group(1), overrides)
    if found := re.search(r"Ambiguous value for argument '([^']+)'", message):
        return f"{found.group(1)}: several values are a sweep. Add -m, or use fedcross.sweep in Python."
    for override in overrides:
        if _value(override) is None:
            name, equals, value = override.partition("=")
            how = f' Quote the value: "{name}={quote(value)}".' if equals else " Write NAME=VALUE."
            return f"{override}: Hydra cannot read this setting.{how}"
    return " ".join(message.partition("See https")[0].split())[:400] + ". See fedcross --help."


def _unknown(name: str, overrides: Sequence[str]) -> str:
    """Return what to write in place of the setting `name`, which the chosen groups do not have."""
    if re.fullmatch(r"method\.(arguments|options)(\..+)?", name) and "method=flwr" in overrides:
        return f"{name}: give a strategy's arguments one by one, each with a plus sign: +method.arguments.NAME=VALUE."
    known = _known_settings()
    if name not in known:
        return f"{name}: no such setting. {nearest(name, known)}"
    group, _, setting = name.rpartition(".")
    values = {one.lstrip("+").partition("=")[0]: one.partition("=")[2] for one in overrides}
    given = f"{name}={values[name]}" if name in values else name
    chosen = f"{group}={values[group]}" if group in values else f"the {group} that is chosen here"
    listed = page("reference/settings.md")
    return f"{given}: {chosen} has no setting {setting}. Leave it out. {listed} lists all settings."


def _known_settings() -> list[str]:
    """Return the dotted names of all settings and groups of the default configuration."""

    def walk(node: Mapping[str, Any], prefix: str) -> list[str]:
        below = [
            name for key, value in node.items() if isinstance(value, dict) for name in walk(value, f"{prefix}{key}.")
        ]
        return [f"{prefix}{name}" for name in node] + below

    groups = [path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_")]
    return groups + walk(compose(()), "")
