"""The generated reference pages are those that the code gives, and the tool that makes them reads what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from docs import reference
from docs.docstrings import described, entries, meanings
from docs.options import Source, comments, settings, span
from fedcross.core.settings import Settings

EMPTY = Source(Path("none.yaml"), "", {}, {}, {})


@pytest.fixture(scope="module")
def made():
    return reference.pages()


@pytest.mark.parametrize("name", ["settings.md", "methods.md", "api.md", "faults.md"])
def test_the_committed_page_is_up_to_date(name, made):
    path = reference.PAGES / name
    assert path.is_file(), "run `make docs` and commit docs/reference"
    assert path.read_text() == made[path], "run `make docs` and commit docs/reference"


def test_no_page_is_left_over(made):
    assert set(reference.PAGES.iterdir()) == set(made)


def test_the_pages_hold_every_option_and_every_method(made):
    text = made[reference.PAGES / "settings.md"]
    for group in ("task", "partition", "model", "engine", "attack", "logger"):
        for path in (reference.CONF / group).glob("*.yaml"):
            assert f"`{group}={path.stem}`" in text
    methods = made[reference.PAGES / "methods.md"]
    for path in (reference.CONF / "method").glob("*.yaml"):
        assert f"## {path.stem}\n" in methods or f"`method={path.stem}`" in methods


def test_a_known_row_in_full(made):
    row = (
        "| `train.lr_decay` | `1.0` | number > 0, ≤ 1 | learning rate of round r is max(lr * lr_decay^(r-1), lr_min) |"
    )
    assert row in made[reference.PAGES / "settings.md"]


class Inner(Settings):
    """A group inside another."""

    size: int = Field(3, ge=1, description="how large")


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
    rows = {row.name: row for row in settings(Outer, "x.", source, "o.")}
    assert (rows["x.rate"].default, rows["x.rate"].span, rows["x.rate"].meaning) == (
        "required",
        "number > 0",
        "What both are.",
    )
    assert (rows["x.limit"].default, rows["x.limit"].span) == ("`2.5`", "number or `null`")
    assert (rows["x.kind"].default, rows["x.kind"].span, rows["x.kind"].meaning) == ("`a`", "`a`, `b`", "which")
    assert (rows["x.inner.size"].default, rows["x.inner.size"].meaning) == ("`3`", "how large")


def test_a_setting_without_a_meaning_is_an_error():
    with pytest.raises(LookupError, match=r"x\.kind: no meaning"):
        list(settings(Outer, "x.", EMPTY))


def test_comments_behind_above_and_continued():
    beside, above = comments(
        "# header\n# of b\nb: 1\na:\n  c: 2   # of c,\n             # and more\n  d: '#no'\n  e: [1, 2] # of e\n"
    )
    assert beside == {"a.c": "of c, and more", "a.e": "of e"}
    assert above == {"b": "of b"}


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


def test_docstrings_become_markdown():
    assert list(entries("a, b : int\n    One\n    two.\nc\n    Three.")) == [
        ("a", "int", "One two."),
        ("b", "int", "One two."),
        ("c", "", "Three."),
    ]
    assert meanings(Outer) == {"rate": "What both are.", "limit": "What both are."}
    text = described("See :class:`~a.B` and ``x``.\n\n    y = 1\n\nRaises\n------\nError\n    If so.")
    assert text == "See `a.B` and `x`.\n\n```text\ny = 1\n```\n\n**Raises**\n\n- `Error`: If so."
