"""Composes each choice of configuration groups once in a process: the tests compose more than a thousand times.

Hydra composes the groups; single values are then set in a copy, by the function with which Hydra sets them.
"""

from __future__ import annotations

import functools
import pickle
import re
from types import SimpleNamespace
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict

from fedcross.conf import compose

MOST = 512
#: The entry of a task's defaults that chooses a model.
OWN_MODEL = "override /model@_global_.model"
#: An override of a single value, as opposed to one that chooses a file.
VALUE = re.compile(r"\+{0,2}(\w+(\.\w+)*)=")
GROUPS = {"hydra", "experiment", *(path.name for path in compose.CONF.iterdir() if path.is_dir())}


def read_choice(group: str, name: str) -> dict[str, Any]:
    """Return the settings of conf/GROUP/NAME.yaml over those of the files that its defaults name, without Hydra.

    The model of a task's defaults is the entry ``default_model``.
    """
    own = yaml.safe_load((compose.CONF / group / f"{name}.yaml").read_text())
    found: dict[str, Any] = {}
    for one in own.pop("defaults", []):
        if isinstance(one, str):
            found |= read_choice(group, one) if one != "_self_" else {}
        elif OWN_MODEL in one:
            found["default_model"] = one[OWN_MODEL]
    return found | own


def read_files_once() -> None:
    """Let Hydra parse each file of ours and of its own once in this process. Files of a test's own are always read."""
    from hydra._internal.config_repository import ConfigRepository

    ours = {"pkg://hydra.conf", f"file://{compose.CONF}", "structured://"}
    found, load = {}, ConfigRepository.load_config

    def load_config(repository: ConfigRepository, config_path: str) -> Any:
        if not {source.full_path() for source in repository.sources} <= ours:
            return load(repository, config_path)
        if config_path not in found:
            found[config_path] = pickle.dumps(load(repository, config_path))
        return pickle.loads(found[config_path])

    ConfigRepository.load_config = load_config


def compose_groups_once() -> None:
    """Replace how :mod:`fedcross.conf.compose` composes in this process; the result is the same.

    Compositions are remembered as pickles, which make a copy five times as fast as ``copy.deepcopy``.
    """
    hydras = compose._composed.__wrapped__
    read_files_once()

    @functools.lru_cache(MOST)
    def by_hydra(overrides: tuple[str, ...], variables: tuple[str, str]) -> bytes:
        return pickle.dumps(hydras(overrides, variables))

    @functools.lru_cache(MOST)
    def composed(overrides: tuple[str, ...], variables: tuple[str, str]) -> bytes:
        values = [o for o in overrides if (found := VALUE.match(o)) and found[1].split(".")[0] not in {"hydra"}]
        values = [o for o in values if VALUE.match(o)[1] not in GROUPS]  # type: ignore[index]
        chosen = tuple(o for o in overrides if o not in values)
        try:
            config = pickle.loads(by_hydra(chosen, variables))
            parsed = OverridesParser.create().parse_overrides(values)
            assert not any(one.is_sweep_override() for one in parsed)
            ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
            with open_dict(config.hydra):
                config.hydra.overrides.task = [o for o in overrides if not compose.is_hydras(o)]
        except Exception:  # noqa: BLE001 - Hydra then raises what it raises for all of them
            return by_hydra(overrides, variables)
        return pickle.dumps(config)

    compose._composed = composed
    compose.copy = SimpleNamespace(deepcopy=pickle.loads)
