"""Composition: Hydra overrides in, one plain dictionary out. The same call serves command line, server and clients."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import PLUGIN_VARIABLE, extra_folders
from tasks.errors import ConfigError, nearest

CONF = Path(__file__).resolve().parent


def plugin_folders() -> list[Path]:
    """Return the existing folders named in ``FEDCROSS_PATH``."""
    named = os.environ.get(PLUGIN_VARIABLE, "").split(os.pathsep)
    folders = [Path(name).expanduser().resolve() for name in named if name]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{PLUGIN_VARIABLE}: no such folder {', '.join(missing)}. Correct or unset the variable.")
    return folders


def activate_plugins() -> list[str]:
    """Make the user's own modules importable; return the Hydra overrides that make their YAML files visible."""
    folders = plugin_folders()
    for package in ("strategies", "tasks", "tasks.models", "tasks.partition"):
        search = importlib.import_module(package).__path__
        search += [folder for folder in extra_folders(package) if folder not in search]
    search_path = ",".join(f"file://{folder / 'conf'}" for folder in folders if (folder / "conf").is_dir())
    return [f"hydra.searchpath=[{search_path}]"] if search_path else []


def join(overrides: Sequence[str]) -> str:
    """Return `overrides` as the one string that travels in Flower's run config."""
    return shlex.join(overrides)


def split(text: str) -> list[str]:
    """Return the overrides in `text`; the inverse of :func:`join`."""
    return shlex.split(text)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration for `overrides`.

    Raises
    ------
    ConfigError
        For a wrong override, with the nearest valid names.
    """
    environment = (os.environ.get(PLUGIN_VARIABLE, ""), os.environ.get("FEDCROSS_DATA", ""))
    return copy.deepcopy(_compose(tuple(overrides), environment))


@functools.lru_cache(maxsize=64)
def _compose(overrides: tuple[str, ...], environment: tuple[str, str]) -> dict[str, Any]:  # noqa: ARG001 - cache key
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(_composed(overrides), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(str(error))) from error
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}


def _composed(overrides: tuple[str, ...], whole: bool = False) -> Any:
    """Return Hydra's own object for `overrides`; with `whole` also its node ``hydra``."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    searchpath = activate_plugins()
    running = GlobalHydra.instance().hydra  # set while Hydra's own main runs this job; composing needs the place
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            return hydra_compose("config", overrides=[*searchpath, *overrides], return_hydra_config=whole)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(str(error))) from error
    finally:
        GlobalHydra.instance().hydra = running


def hydra_part(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what Hydra itself would do with `overrides`: its ``mode``, the sweep's ``params`` and its ``dir``.

    Raises
    ------
    ConfigError
        For a wrong override, with the nearest valid names.
    """
    config = _composed(tuple(overrides), whole=True)
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        params = OmegaConf.select(config, "hydra.sweeper.params")
        return {
            "mode": getattr(config.hydra.mode, "name", config.hydra.mode),
            "params": OmegaConf.to_container(params, resolve=True) if params is not None else {},
            "dir": str(config.hydra.sweep.dir),
        }
    except OmegaConfBaseException as error:
        raise ConfigError(explain(str(error))) from error


def explain(message: str) -> str:
    """Return Hydra's `message` as one sentence with the nearest valid name."""
    if found := re.search(r"Could not find '([\w-]+)/([^']+)'", message):
        group, name = found.groups()
        known = sorted(
            p.stem for root in (CONF, *(f / "conf" for f in plugin_folders())) for p in root.glob(f"{group}/*.yaml")
        )
        return f"{group}={name}: there is no such {group}. {nearest(name, known)}"
    if (found := re.search(r"Could not override '([^']+)'", message)) and "In '" not in message:
        name = found.group(1)
        return f"{name}: no such setting. {nearest(name, _known_settings())} A new setting is added with +{name}=..."
    if found := re.search(r"Key '([^']+)' is not in struct|In '([^']+)'", message):
        name = found.group(1) or found.group(2)
        return f"{name}: {' '.join(message.split())[:300]}. See fedcross --help."
    return " ".join(message.split())[:400] + ". See fedcross --help."


def _known_settings() -> list[str]:
    """Return the dotted names of all settings and groups of the default configuration."""
    names: list[str] = [p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("_")]

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node.items():
            names.append(prefix + str(name))
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    with contextlib.suppress(ConfigError):
        walk(compose(()), "")
    return names


def main_folder() -> Path:
    """Return the folder that holds the packages (the checkout, or site-packages)."""
    return Path(sys.modules["conf"].__file__ or __file__).resolve().parent.parent
