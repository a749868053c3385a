"""Overrides in Hydra's grammar as one text, as Flower's run config carries them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError


def join(overrides: Sequence[str]) -> str:
    """Return `overrides` as one string for Flower's run config."""
    return shlex.join(overrides)


def split(text: str) -> list[str]:
    """Return the overrides in `text`; the inverse of :func:`join`.

    Raises
    ------
    ConfigError
        If a quote or a backslash in `text` has no end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"overrides={text}: {error}. As in a shell, a quote needs a second one, or a backslash before it."
        ) from error


def quote(value: str) -> str:
    """Return `value` as a Hydra string that keeps every character."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def shown(folder: Path | str) -> str:
    """Return `folder` to be pasted in a shell behind ``resume=`` or ``output=``, quoted for both where needed."""
    text = str(folder)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return shlex.quote(quote(text)) if set(text) & set("'\"$`\\!") else f'"{quote(text)}"'


def unquote(text: str) -> str:
    """Return the value of a Hydra string; the inverse of :func:`quote`. Text without quotes stays as it is."""
    if len(text) < 2 or not text.startswith("'") or not text.endswith("'"):
        return text
    return re.sub(r"\\([\\'])", r"\1", text[1:-1])
