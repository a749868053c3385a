"""Composes Hydra overrides into one plain dictionary; command line, server and clients all use the same function."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedcross.conf.own import translated
from fedcross.core.errors import ConfigError, nearest
from fedcross.core.overrides import join as join
from fedcross.core.overrides import split as split
from fedcross.core.paths import page, room
from fedcross.core.plugins import PLUGIN_VARIABLE, extra_folders, named_folders

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

CONF = Path(__file__).resolve().parent
#: Packages to which a plug-in folder adds modules.
PLUGIN_PACKAGES = ("strategies", "tasks", "tasks.models", "tasks.partition")
#: Settings that only name folders. They are added to a composition afterwards, so that the command line, the record of
#: the run and both of Flower's apps (which get absolute paths) share one composition.
PLACES = ("output", "resume", "data_root")
#: Number of compositions that are cached, because a sweep checks many jobs before it starts.
MOST_COMPOSED = 32
#: Cache. Key: overrides, without folders and Hydra's own settings, and the environment. Value: Hydra's object, and the
#: overrides of Hydra's own settings.
_composed: dict[tuple[tuple[str, ...], tuple[str, str]], tuple[DictConfig, tuple[str, ...]]] = {}


class UnknownSettingError(ConfigError):
    """An override of a setting that does not exist; `name` is what it would set."""

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
    """Return the existing folders named in ``FEDCROSS_PATH``."""
    folders = named_folders()
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{PLUGIN_VARIABLE}: no such folder {', '.join(missing)}. Correct or unset the variable.")
    return folders


def _shadows(folders: Sequence[Path]) -> list[str]:
    """Return an error for every plug-in file with the same name as one of fedcross or of another plug-in folder."""
    if not folders:
        return []
    homes = {package: room(package.split(".")[0]).joinpath(*package.split(".")[1:]) for package in PLUGIN_PACKAGES}
    places = [(home, package.replace(".", "/"), "*.py") for package, home in homes.items()]
    places += [(group, f"conf/{group.name}", "*.yaml") for group in CONF.iterdir() if group.is_dir()]
    faults = []
    for home, below, pattern in places:
        taken = {path.name: path for path in home.glob(pattern)}
        for folder in folders:
            for path in sorted((folder / below).glob(pattern)):
                if path.name == "__init__.py":
                    continue
                if path.name in taken:
                    faults.append(f"{path}: {taken[path.name]} has this name already. Rename yours.")
                taken.setdefault(path.name, path)
    return faults


def activate_plugins() -> list[str]:
    """Make the user's own modules importable; return the Hydra overrides that make their YAML files visible."""
    folders = plugin_folders()
    if faults := _shadows(folders):
        raise ConfigError(faults)
    for package in PLUGIN_PACKAGES:
        search = importlib.import_module(f"fedcross.{package}").__path__
        search += [folder for folder in extra_folders(package) if folder not in search]
    search_path = ",".join(f"file://{folder / 'conf'}" for folder in folders if (folder / "conf").is_dir())
    return [f"hydra.searchpath=[{search_path}]"] if search_path else []


def environment() -> tuple[str, str]:
    """Return the environment variables that a configuration depends on, beside the overrides."""
    return os.environ.get(PLUGIN_VARIABLE, ""), os.environ.get("FEDCROSS_DATA", "")


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved configuration for `overrides`.

    Raises
    ------
    ConfigError
        For a wrong override, with the nearest valid names.
    """
    return copy.deepcopy(_plain(tuple(overrides), environment()))


@functools.lru_cache(maxsize=512)
def _plain(overrides: tuple[str, ...], variables: tuple[str, str]) -> dict[str, Any]:
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    chosen, places = _apart([o for o in overrides if not is_hydras(o)])
    config = _assembled(chosen, variables)
    for name, value in places.items():
        config[name] = value
    try:
        nodes = ((str(name), config[name]) for name in config if name != "hydra")
        return {
            name: OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig | ListConfig) else node
            for name, node in nodes
        }
    except OmegaConfBaseException as error:
        raise ConfigError(explain(str(error))) from error


def whole(overrides: Sequence[str]) -> DictConfig:
    """Return Hydra's own object for a command line, with its node ``hydra``; nothing in it is resolved yet.

    Later calls of :func:`compose` for the same settings use the same composition, wherever the run's folder lies.

    Raises
    ------
    ConfigError
        For a wrong override, with the nearest valid names.
    """
    hydras = tuple(o for o in overrides if is_hydras(o))
    chosen, places = _apart([o for o in overrides if not is_hydras(o)])
    key = (chosen, environment())
    if key not in _composed or _composed[key][1] != hydras:
        _remember(key, _composition((*chosen, *hydras)), hydras)
    return _placed(_composed[key][0], places)


def run_folder(overrides: Sequence[str]) -> Path:
    """Return the folder of a run without ``output``: ``hydra.run.dir``."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        return Path(str(whole(overrides).hydra.run.dir))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(str(error))) from error


def is_hydras(override: str) -> bool:
    """Return whether `override` sets one of Hydra's own settings, which a run neither records nor passes to Flower."""
    return override.startswith(("hydra.", "hydra/", "+hydra", "++hydra", "~hydra"))


def _apart(overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Split `overrides`: return those that do not set :data:`PLACES`, and the values of PLACES that the others set."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    chosen, places = [], {}
    for override in overrides:
        name = override.partition("=")[0]
        if name in PLACES:
            with contextlib.suppress(HydraException):  # Hydra itself will report what is wrong
                (parsed,) = OverridesParser.create().parse_overrides([override])
                if not parsed.is_sweep_override():
                    places[name] = parsed.value()
                    continue
        chosen.append(override)
    return tuple(chosen), places


def _placed(config: DictConfig, places: dict[str, Any]) -> DictConfig:
    """Return a copy of `config` with the values of `places`."""
    placed = copy.deepcopy(config)
    for name, value in places.items():
        placed[name] = value
    return placed


def _assembled(chosen: tuple[str, ...], variables: tuple[str, str]) -> DictConfig:
    """Return the composition of `chosen`: a copy of a remembered one, with the settings that it lacks.

    Hydra merges the files that the groups name, then applies the settings. The second step costs a tenth of the first,
    so that the jobs of a sweep, which mostly differ in settings, share the first.
    """
    from omegaconf.errors import OmegaConfBaseException

    settings = () if (chosen, variables) in _composed else _settings(chosen)
    lines = {setting.input_line for setting in settings or ()}
    key = (tuple(o for o in chosen if o not in lines), variables)
    if key not in _composed:
        _remember(key, _composition(key[0]), ())
    config = copy.deepcopy(_composed[key][0])
    try:
        for setting in settings or ():
            added = setting.is_force_add()
            OmegaConf.update(config, setting.key_or_group, setting.value(), merge=True, force_add=added)
    except OmegaConfBaseException:
        return _composition(chosen)  # which tells what is wrong
    return config


def _settings(chosen: tuple[str, ...]) -> tuple[Override, ...] | None:
    """Return those of `chosen` that set values, None unless each of them can be applied to a composition of the rest.

    That is so for ``NAME=VALUE`` and ``++NAME=VALUE``. The others choose a file of a group.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(chosen))
    except HydraException:
        return None
    roots = [CONF, *(folder / "conf" for folder in plugin_folders())]
    settings = [one for one in parsed if not any((root / one.key_or_group).is_dir() for root in roots)]
    simple = OverrideType.CHANGE, OverrideType.FORCE_ADD
    if any(one.type not in simple or one.package is not None or one.is_sweep_override() for one in settings):
        return None
    return tuple(settings)


def _remember(key: tuple[tuple[str, ...], tuple[str, str]], config: DictConfig, hydras: tuple[str, ...]) -> None:
    while len(_composed) >= MOST_COMPOSED:
        del _composed[next(iter(_composed))]
    _composed[key] = config, hydras


def _composition(overrides: tuple[str, ...]) -> DictConfig:
    """Return Hydra's composition of `overrides`; apart from Hydra's own sweeps, only this function composes."""
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
            return hydra_compose("config", overrides=[*searchpath, *translated(overrides)], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        if found := re.search(UNKNOWN, str(error)):
            raise UnknownSettingError(explain(str(error), overrides), found.group(1)) from error
        raise ConfigError(explain(str(error))) from error
    finally:
        GlobalHydra.instance().hydra = running


def hydra_part(overrides: Sequence[str]) -> dict[str, Any]:
    """Return Hydra's own settings for `overrides`: its ``mode``, the sweep's ``params`` and its ``dir``.

    Raises
    ------
    ConfigError
        For a wrong override, with the nearest valid names.
    """
    from omegaconf.errors import OmegaConfBaseException

    config = whole(overrides)
    try:
        params = OmegaConf.select(config, "hydra.sweeper.params")
        return {
            "mode": getattr(config.hydra.mode, "name", config.hydra.mode),
            "params": OmegaConf.to_container(params, resolve=True) if params is not None else {},
            "dir": str(config.hydra.sweep.dir),
        }
    except OmegaConfBaseException as error:
        raise ConfigError(explain(str(error))) from error


#: Hydra's words about an override of a setting that does not exist.
UNKNOWN = r"Could not override '([^']+)'"
#: Words of Hydra's parser about an override that it cannot read.
UNREADABLE = ("mismatched input", "no viable alternative", "LexerNoViableAlt", "extraneous input", "missing EQUAL")
UNREAD = (
    "A setting cannot be read. Write NAME=VALUE without spaces, and quote a value with special characters: "
    "\"output='/tmp/a[1]'\"."
)


def explain(message: str, overrides: Sequence[str] = ()) -> str:
    """Return Hydra's `message` about `overrides` as one sentence with the nearest valid name."""
    if found := re.search(r"Could not find '([\w-]+)/([^']+)'", message):
        group, name = found.groups()
        folders = [root / group for root in (CONF, *(f / "conf" for f in plugin_folders()))]
        known = sorted(
            path.relative_to(folder).with_suffix("").as_posix()
            for folder in folders
            for path in folder.rglob("*.yaml")
            if not path.name.startswith("_")
        )
        return f"{group}={name}: there is no such {group}. {nearest(name, known)}"
    if (found := re.search(UNKNOWN, message)) and "In '" not in message:
        name = found.group(1)
        known = _known_settings()
        if re.fullmatch(r"method\.(arguments|options)(\..+)?", name) and "method=flwr" in overrides:
            return (
                f"{name}: give a strategy's arguments one by one, each with a plus sign: +method.arguments.NAME=VALUE."
            )
        if name in known:
            return _not_among(name, overrides)
        return f"{name}: no such setting. {nearest(name, known)}"
    if found := re.search(r"Key '([^']+)' is not in struct|In '([^']+)'", message):
        name = found.group(1) or found.group(2)
        return f"{name}: {' '.join(message.split())[:300]}. See fedcross --help."
    if found := re.search(r"Ambiguous value for argument '([^']+)'", message):
        return f"{found.group(1)}: several values are a sweep. Add -m, or use fedcross.sweep in Python."
    if any(words in message for words in UNREADABLE):
        return f"{UNREAD} Hydra says: {' '.join(message.partition('See https')[0].split())[:160]}."
    return " ".join(message.split())[:400] + ". See fedcross --help."


def _not_among(name: str, overrides: Sequence[str]) -> str:
    """Return that what `overrides` choose has no setting `name`, which another choice has."""
    group, _, setting = name.rpartition(".")
    values = {one.lstrip("+").partition("=")[0]: one.partition("=")[2] for one in overrides}
    given = f"{name}={values[name]}" if name in values else name
    chosen = f"{group}={values[group]}" if group in values else f"the {group} that is chosen here"
    listed = page("reference/settings.md")
    return f"{given}: {chosen} has no setting {setting}. Leave it out. {listed} lists what there is."


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
