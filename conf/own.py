"""``model=package.module:Class``: an own network on the command line, as overrides that Hydra can compose."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedcross.core.errors import ConfigError

#: A model that is named by its import path. Several at once (a sweep) need a YAML file each.
BY_PATH = re.compile(r"^model=(['\"]?)([^,'\"]*:[^,'\"]*)\1$")

#: A colon as Hydra writes it in the jobs of a sweep.
ESCAPED = "\\:"


def translated(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` with ``model=package.module:Class`` as ``model=own`` and its path.

    The settings of such a model are the arguments of its class, which no YAML file lists. So ``model.X=...`` becomes
    ``++model.X=...``. All other overrides stay as they are.

    Raises
    ------
    ConfigError
        If an override names several networks.
    """
    for override in overrides:
        if override.startswith("model=") and ":" in override and "," in override:
            raise ConfigError(
                f"{override}: Hydra cannot sweep over import paths. Give each network a YAML file (docs/own-model.md), "
                "or use fedcross.sweep in Python."
            )
    chosen = [override for override in overrides if override.startswith("model=")]
    if not chosen or not BY_PATH.match(chosen[-1]):
        return list(overrides)
    found: list[str] = []
    for override in overrides:
        named = BY_PATH.match(override)
        if named:
            found += ["model=own", f"++model.path='{named.group(2).replace(ESCAPED, ':')}'"]
        else:
            found.append(f"++{override}" if override.startswith("model.") else override)
    return found
