"""Griffe extension: reStructuredText's roles in docstrings become code marks, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]+)`")


def plain(text: str) -> str:
    """Return `text` with Markdown's code marks in place of roles and double backquotes."""
    return ROLE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", text).replace("``", "`")


class Roles(Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)
