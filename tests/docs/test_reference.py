"""The generated pages are those that the code gives, and the tools that make them read what they should."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from docs import reference
from docs.griffe_roles import plain
from docs.options import Source, comments, meanings, settings, span
from fedcross.core.settings import Settings


def test_the_committed_pages_are_up_to_date_and_complete():
    made = reference.pages()
    for path, text in made.items():
        assert path.read_text() == text, "run `make docs` and commit docs/reference"
        assert "|  |\n" not in text.partition("## engine")[0].partition("## task")[0], "a setting without a meaning"
    for group in ("task", "partition", "model", "engine", "attack", "logger"):
        for path in (reference.CONF / group).glob("*.yaml"):
            assert f"`{group}={path.stem}`" in made[reference.PAGES / "settings.md"]
    for path in (reference.CONF / "method").glob("*.yaml"):
        text = made[reference.PAGES / "methods.md"]
        assert f"## {path.stem}\n" in text or f"`method={path.stem}`" in text


class Inner(Settings):
    """A group inside another: ``size`` is how large."""

    size: int = Field(3, ge=1)


class Outer(Settings):
    """A group.

    Attributes
    ----------
    rate, limit : float
        What both
        are.
    """

    rate: float = Field(gt=0)
    limit: float | None = None
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner()


def test_where_defaults_ranges_and_meanings_come_from():
    source = Source(Path("x.yaml"), "", {"o": {"limit": 2.5}}, {"o.kind": "which"}, {})
    rows = {row.name: (row.default, row.span, row.meaning) for row in settings(Outer, "x.", source, "o.")}
    assert rows["x.rate"] == ("required", "number > 0", "What both are.")
    assert rows["x.limit"] == ("`2.5`", "number or `null`", "What both are.")
    assert rows["x.kind"] == ("`a`", "`a`, `b`", "which")
    assert rows["x.inner.size"] == ("`3`", "whole number ≥ 1", "A group inside another: ``size`` is how large.")
    assert meanings(Outer)["limit"] == "What both are."


def test_comments_behind_above_and_continued():
    text = "# header\n# of b\nb: 1\na:\n  c: 2   # of c,\n             # and more\n  d: '#no'\n  e: [1, 2] # of e\n"
    assert comments(text) == ({"a.c": "of c, and more", "a.e": "of e"}, {"b": "of b"})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (bool, "`true`, `false`"),
        (int | None, "whole number or `null`"),
        (Literal["auto"] | Annotated[int, Field(ge=1)], "whole number ≥ 1 or `auto`"),
        (tuple[int, ...], "list of whole number"),
        (dict[str, float], "mapping"),
    ],
)
def test_ranges_in_words(kind, text):
    assert span(kind) == text


def test_roles_become_code():
    assert plain("See :class:`~a.B` and ``x``.") == "See `B` and `x`."
