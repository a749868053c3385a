"""The text of ``fedcross --help`` for a reader: as wide as the terminal, with pages where they are."""

from __future__ import annotations

import re
import shutil
import textwrap

from fedcross.core.paths import page

#: Columns where there is no terminal, and the fewest and most that are used.
WIDTH, NARROW, WIDE = 100, 40, 120
#: A line of a table: what is told of begins behind two spaces.
_TABLE = re.compile(r"\S.*?\s{2,}(?=\S)")


def fitted(text: str, width: int | None = None) -> str:
    """Return `text` in lines of at most `width` columns (the terminal's if None); long lines go on indented."""
    width = width or min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROW), WIDE)
    text = re.sub(r"\bdocs/(\S+\.md)", lambda found: page(found[1]), text)
    return "".join(f"{line}\n" for one in text.splitlines() for line in _lines(one, width))


def _lines(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    found = _TABLE.match(line)
    told = found.end() if found and found.end() <= width // 2 else 4
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * told, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(line)
