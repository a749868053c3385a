"""Composes each choice of configuration groups once in a process: the tests compose more than a thousand times.

Hydra composes the groups; single values are then set in a copy, by the function with which Hydra sets them.
"""

from __future__ import annotations

import copy
import functools
import re

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from fedcross.conf import compose

MOST = 512
#: An override of a single value, as opposed to one that chooses a file.
VALUE = re.compile(r"\+{0,2}(\w+(\.\w+)*)=")
GROUPS = {"hydra", "experiment", *(path.name for path in compose.CONF.iterdir() if path.is_dir())}


def compose_groups_once() -> None:
    """Replace how :mod:`fedcross.conf.compose` composes in this process; the result is the same."""
    by_hydra = functools.lru_cache(MOST)(compose._composed.__wrapped__)

    @functools.lru_cache(MOST)
    def composed(overrides: tuple[str, ...], variables: tuple[str, str]) -> DictConfig:
        values = [o for o in overrides if (found := VALUE.match(o)) and found[1].split(".")[0] not in {"hydra"}]
        values = [o for o in values if VALUE.match(o)[1] not in GROUPS]  # type: ignore[index]
        chosen = tuple(o for o in overrides if o not in values)
        try:
            config = copy.deepcopy(by_hydra(chosen, variables))
            parsed = OverridesParser.create().parse_overrides(values)
            assert not any(one.is_sweep_override() for one in parsed)
            ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
            with open_dict(config.hydra):
                config.hydra.overrides.task = [o for o in overrides if not compose.is_hydras(o)]
        except Exception:  # noqa: BLE001 - Hydra then raises what it raises for all of them
            return by_hydra(overrides, variables)
        return config

    compose._composed = composed
