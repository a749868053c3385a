"""Lines of the report of ``fedcross doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report; a fault or a note also says what to do."""

    kind: Literal["ok", "note", "FAULT"]
    text: str


def ok(text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding("ok", text)


def note(text: str) -> Finding:
    """Return a finding that the user should know, but that is not wrong."""
    return Finding("note", text)


def fault(text: str) -> Finding:
    """Return a finding that the user must repair."""
    return Finding("FAULT", text)
