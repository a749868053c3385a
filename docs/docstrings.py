"""Docstrings (NumPy style, reStructuredText marks) as Markdown, for the pages that ``docs/reference.py`` writes."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]+)`")
ITEM = re.compile(r"([-*]|\d+\.|\(\d+\)) ")
#: Sections whose entries are ``name : type`` with an indented meaning, and sections of plain text.
ENTRIES = ("Parameters", "Attributes", "Other Parameters")
SECTIONS = (*ENTRIES, "Returns", "Yields", "Raises", "Notes", "Examples", "References", "See Also")


def plain(text: str) -> str:
    """Return `text` with Markdown's code marks in place of reStructuredText's roles and double backquotes."""
    text = ROLE.sub(lambda found: f"`{found.group(1).removeprefix('meth:')}`", text)
    return text.replace("``", "`").replace("|", "\\|") if "|" in text and "`" not in text else text.replace("``", "`")


def sections(doc: str | None) -> dict[str, str]:
    """Return the parts of docstring `doc` by heading; the text before the first heading has the name ``""``."""
    lines = inspect.cleandoc(doc or "").splitlines()
    found: dict[str, list[str]] = {"": []}
    heading = ""
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if line.strip() in SECTIONS and re.fullmatch(r"-{3,}", below.strip()):
            heading = line.strip()
            found[heading] = []
        elif not (heading and not found[heading] and re.fullmatch(r"-{3,}", line.strip())):
            found[heading].append(line)
    return {name: "\n".join(text).strip("\n") for name, text in found.items()}


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, type, meaning) for each entry of a section such as Parameters; ``a, b : int`` gives two."""
    head: str | None = None
    body: list[str] = []
    for line in [*text.splitlines(), "end"]:
        if line and not line.startswith(" "):
            if head is not None:
                names, _, kind = head.partition(" : ")
                for name in names.split(","):
                    yield name.strip(), kind.strip(), " ".join(" ".join(body).split())
            head, body = line, []
        else:
            body.append(line)


def meanings(kind: type) -> dict[str, str]:
    """Return the meaning of each attribute that the docstrings of `kind` and its bases describe."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        parts = sections(base.__dict__.get("__doc__"))
        for heading in ENTRIES:
            found.update((name, meaning) for name, _, meaning in entries(parts.get(heading, "")))
    return found


def markdown(text: str) -> str:
    """Return the running text of a docstring as Markdown: paragraphs, lists, and indented blocks as code."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(_block(block) for block in blocks if block.strip())


def _block(block: str) -> str:
    lines = block.splitlines()
    if ITEM.match(lines[0]):
        return _items(lines)
    if all(line.startswith("    ") for line in lines):
        inner = textwrap.dedent(block)
        return _block(inner) if ITEM.match(inner) else f"```text\n{inner}\n```"
    indented = [number for number, line in enumerate(lines) if line.startswith("    ")]
    if indented and indented[0]:  # a paragraph whose last line introduces an indented list or block
        first = indented[0]
        return _block("\n".join(lines[:first])) + "\n\n" + _block("\n".join(lines[first:]))
    return plain("\n".join(lines)).removesuffix("::").rstrip()


def _items(lines: list[str]) -> str:
    """Return a list whose continued lines are indented by four, as Python-Markdown wants them."""
    out = []
    for line in lines:
        if found := ITEM.match(line):
            mark = found.group(1) if found.group(1)[0].isdigit() else "-"
            out.append(f"{mark} {plain(line[found.end() :])}")
        else:
            out.append("    " + plain(line.strip()))
    return "\n".join(out)


def described(doc: str | None) -> str:
    """Return a whole NumPy docstring as Markdown, its sections as bold headings with lists."""
    parts = sections(doc)
    text = [markdown(parts.pop(""))]
    for heading, body in parts.items():
        text.append(f"**{heading}**")
        if heading in ENTRIES:
            kinds = (
                (name, f" ({plain(kind)})" if kind else "", plain(meaning)) for name, kind, meaning in entries(body)
            )
            text.append("\n".join(f"- `{name}`{kind}: {meaning}" for name, kind, meaning in kinds))
        elif heading == "Raises":
            text.append("\n".join(f"- `{name}`: {plain(meaning)}" for name, _, meaning in entries(body)))
        else:
            text.append(markdown(textwrap.dedent(body)))
    return "\n\n".join(part for part in text if part)
