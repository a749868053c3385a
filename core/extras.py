"""Packages of the optional extras: imported where they are first needed, with an error that names the extra."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedcross.core.errors import ConfigError


def install(extra: str) -> str:
    """Return the sentence that says how to install the optional dependencies `extra` (README, Extras)."""
    return f"Install it in the checkout with: pip install -e '.[{extra}]'"


def needed(module: str, extra: str, what: str) -> ModuleType:
    """Return `module`, which belongs to the optional dependencies `extra` of fedcross.

    Parameters
    ----------
    module : str
        Its import name.
    extra : str
        The extra that installs it.
    what : str
        What it is needed for: the start of the message.

    Raises
    ------
    ConfigError
        If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ConfigError(f"{what}: {module.partition('.')[0]} is not installed. {install(extra)}.") from error
