"""The text of ``fedcross --help``, from ``conf/config.yaml`` and the folders of groups, without Hydra."""

from __future__ import annotations

import re
import shutil
import textwrap

from fedcross.core.paths import page, room

#: Columns where there is no terminal, and the fewest and most that are used.
WIDTH, NARROW, WIDE = 100, 40, 120


def help_text(width: int | None = None) -> str:
    """Return the help in lines of at most `width` columns; by default as wide as the terminal."""
    import yaml

    width = width or min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROW), WIDE)
    text = yaml.safe_load((room("conf") / "config.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    text = text.replace("$APP_CONFIG_GROUPS", "\n".join(_groups()))
    text = re.sub(r"\bdocs/(\S+\.md)", lambda found: page(found[1]), text)
    return "\n".join(part for line in text.splitlines() for part in _wrapped(line, width))


def _groups() -> list[str]:
    """Return a line for each configuration group with its choices."""
    lines = []
    for folder in sorted(path for path in room("conf").iterdir() if path.is_dir()):
        files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
        names = sorted(path.as_posix() for path in files if not path.name.startswith("_"))
        if names:
            lines.append(f"{folder.name}: {', '.join(names)}")
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    """Return `line` in several; what follows two spaces, as in a table, is indented."""
    if len(line) <= width:
        return [line]
    table = re.match(r"\S.*?\s{2,}(?=\S)", line)
    indent = table.end() if table and table.end() <= width // 2 else 4
    wrap = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(line)
