"""Short names of settings, and networks named by import path, as overrides that Hydra can compose."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedcross.core.errors import ConfigError

#: Short name -> setting.
SHORT = {
    "clients": "partition.clients",
    "beta": "partition.beta",
    "alpha": "method.alpha",
    "lr": "train.lr",
    "epochs": "train.epochs",
    "batch": "train.batch",
    "K": "clients_per_round",
}
#: ``model=package.module:Class``, quoted or not.
_BY_PATH = re.compile(r"^model=(['\"]?)([^,'\"]*:[^,'\"]*)\1$")


def full_names(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` with the settings that short names stand for: ``lr=0.1`` becomes ``train.lr=0.1``."""
    found = []
    for override in overrides:
        plus, name, rest = re.match(r"(\+*)([^=]*)(.*)", override, re.DOTALL).groups()  # type: ignore[union-attr]
        found.append(f"{plus}{SHORT.get(name, name)}{rest}" if rest else override)
    return found


def translated(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` with full names, and ``model=package.module:Class`` as ``model=own`` and its path.

    The settings of such a network are its constructor's arguments, so ``model.X=...`` becomes ``++model.X=...``. A
    ConfigError says that one override names several networks.
    """
    overrides = full_names(overrides)
    chosen = [override for override in overrides if override.startswith("model=")]
    if several := [override for override in chosen if ":" in override and "," in override]:
        cure = "Give each network a YAML file (docs/own-model.md), or use fedcross.sweep in Python."
        raise ConfigError(f"{several[0]}: Hydra cannot sweep over import paths. {cure}")
    if not chosen or not _BY_PATH.match(chosen[-1]):
        return overrides
    found: list[str] = []
    for override in overrides:
        if named := _BY_PATH.match(override):
            path = named.group(2).replace("\\:", ":")  # Hydra escapes the colon in the jobs of a sweep
            found += ["model=own", f"++model.path='{path}'"]
        else:
            found.append(f"++{override}" if override.startswith("model.") else override)
    return found
