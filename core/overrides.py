"""Overrides in Hydra's grammar as one text, as Flower's run config carries them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence


def join(overrides: Sequence[str]) -> str:
    """Return `overrides` as one string for Flower's run config."""
    return shlex.join(overrides)


def split(text: str) -> list[str]:
    """Return the overrides in `text`; the inverse of :func:`join`."""
    return shlex.split(text)


def quote(value: str) -> str:
    """Return `value` as a Hydra string that keeps every character."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def unquote(text: str) -> str:
    """Return the value of a Hydra string; the inverse of :func:`quote`. Text without quotes stays as it is."""
    if len(text) < 2 or not text.startswith("'") or not text.endswith("'"):
        return text
    return re.sub(r"\\([\\'])", r"\1", text[1:-1])
