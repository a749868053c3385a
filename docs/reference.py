"""``python -m docs.reference``: writes the tables of settings and methods, ``docs/reference/*.md``.

They come from the settings classes and ``conf/``. The docstrings on the page of methods are mkdocstrings' business.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.griffe_roles import plain
from docs.options import Setting, Source, flow, read, settings
from fedcross.conf import schema

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
PAGES = ROOT / "docs" / "reference"
MADE = "<!-- Made by `make docs` from the code and conf/; do not edit. -->"
EMPTY = Source(Path("none"))
GROUPS = ("task", "partition", "model", "objective", "engine")
SETTINGS = f"""{MADE}

# Settings

A setting is given on the command line as `NAME=VALUE`, or to `fedcross.run` as one text each. `A=B` for a group such as
`task` or `method` chooses the file `conf/A/B.yaml`. The settings of the methods have [their own page](methods.md).
`fedcross --cfg job` shows the configuration that a command gives.

## The run"""
METHODS = f"""{MADE}

# Methods and their settings

One section per file of `strategies/`: the paper, the formula, what the server and the clients keep (*State*), what
travels (*Wire*), deviations, and every setting. [Methods](../methods.md) compares them."""


def table(rows: Iterable[Setting]) -> str:
    """Return settings as a table."""
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    lines += [f"| `{r.name}` | {r.default} | {r.span} | {plain(r.meaning).replace('|', '/')} |" for r in rows]
    return "\n".join(lines)


def first_sentence(doc: str | None) -> str:
    """Return the first sentence of a docstring on one line."""
    return plain(" ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())).partition(". ")[0].rstrip(".") + "."


def settings_page() -> str:
    """Return the page of all settings but the methods'."""
    source = read(CONF / "config.yaml")
    fields = schema.RunConfig.model_fields
    groups = {name for name, info in fields.items() if nested(info.annotation) or name not in source.values}
    parts = [SETTINGS, table(settings(schema.RunConfig, "", source, skip=groups))]
    for name, info in fields.items():
        kind: Any = info.annotation
        if name in source.values and name not in (*schema.PACKAGES, "logger", "attack") and nested(kind):
            parts += [f"## {name}", first_sentence(kind.__doc__), table(settings(kind, f"{name}.", source, f"{name}."))]
    for group in GROUPS:
        parts += [f"## {group}", *group_section(group)]
    for group in ("clock", "devices", "attack"):
        parts += [f"## {group}", *choice_section(group, fields[group].annotation)]
    return "\n\n".join([*parts, "## logger", logger_table()]) + "\n"


def nested(kind: Any) -> bool:
    """Return whether a field of class `kind` is a group of settings."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def sources(group: str) -> list[Source]:
    """Return the YAML files of a group, in alphabetical order."""
    return [read(path) for path in sorted((CONF / group).glob("*.yaml"))]


def module_of(source: Source) -> str:
    """Return the name of the module that implements the option in `source`."""
    return str(source.values.get("module", source.values.get("name", source.path.stem)))


def says(source: Source) -> str:
    """Return the explanation in the first comment of a YAML file, after the command that it starts with."""
    return source.header.partition("  ")[2].strip().replace("|", "/")


def group_section(group: str) -> list[str]:
    """Return the options of `group`, then their settings: those of several options once, under their common class."""
    owners: dict[type[BaseModel], dict[str, list[tuple[str, Setting]]]] = {}
    options = ["| option | is | settings |", "|---|---|---|"]
    for source in sources(group):
        kind = schema.settings_class(group, module_of(source))
        rows = list(settings(kind, f"{group}.", source if source.path.stem == module_of(source) else parent(source)))
        for row in rows:
            owners.setdefault(owner_of(kind, row.name.split(".")[1]), {}).setdefault(row.name, []).append(
                (source.path.stem, row)
            )
        own = ", ".join(f"`{row.name.split('.', 1)[1]}`" for row in rows)
        options.append(f"| `{group}={source.path.stem}` | {says(source) or module_says(group, source)} | {own} |")
    parts = ["\n".join(options)]
    for found in owners.values():
        parts += [table(merged(uses) for uses in found.values())]
    if group == "task":
        from fedcross.tasks.augment import Augment

        parts += ["`task.augment` of pictures:", table(settings(Augment, "task.augment.", EMPTY))]
    return parts


def module_says(group: str, source: Source) -> str:
    """Return the first sentence of the module of an option."""
    try:
        return first_sentence(importlib.import_module(f"{schema.PACKAGES[group]}.{module_of(source)}").__doc__)
    except ModuleNotFoundError:  # objective=own
        return ""


def parent(source: Source) -> Source:
    """Return `source` with the comments of the file that its module is named after."""
    path = source.path.with_name(f"{module_of(source)}.yaml")
    base = read(path) if path.exists() else EMPTY
    return Source(source.path, source.header, source.values, {**base.beside, **source.beside}, base.above)


def owner_of(kind: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the class in whose body field `name` stands."""
    return next(base for base in reversed(kind.__mro__) if name in getattr(base, "__annotations__", {}))


def merged(uses: list[tuple[str, Setting]]) -> Setting:
    """Return one row for the same setting of several options; where their defaults differ, the row names them."""
    rows = [row for _, row in uses]
    common, _ = Counter(row.default for row in rows).most_common(1)[0]
    meaning = next((row.meaning for row in rows if row.meaning), "")
    by: dict[str, list[str]] = {}
    for option, row in uses:
        by.setdefault(row.default, []).append(option)
    text = "; ".join(f"{value} ({', '.join(options)})" for value, options in by.items()) if len(by) > 1 else common
    return Setting(rows[0].name, text, rows[0].span, meaning)


def choice_section(group: str, kind: Any) -> list[str]:
    """Return the options of `group`, whose files all have the settings of class `kind`, and those settings."""
    files = sources(group)
    rows = ["| option | is |", "|---|---|", *(f"| `{group}={one.path.stem}` | {says(one)} |" for one in files)]
    beside = {name: text for one in files for name, text in one.beside.items()}
    source = Source(CONF, beside=beside)
    return [first_sentence(kind.__doc__), "\n".join(rows), table(settings(kind, f"{group}.", source, skip={"name"}))]


def logger_table() -> str:
    """Return the loggers; their settings are plain text, so YAML alone says what they are."""
    rows = ["| option | setting | default | meaning |", "|---|---|---|---|"]
    for source in sources("logger"):
        own = {name: value for name, value in source.values.items() if name != "name"}
        rows += [f"| `logger={source.path.stem}` | | | {says(source)} |"]
        rows += [f"| | `logger.{name}` | `{value}` | {source.beside.get(name, '')} |" for name, value in own.items()]
    return "\n".join(rows)


def methods_page() -> str:
    """Return the page of all methods."""
    found: dict[str, list[Source]] = {}
    for source in sorted(sources("method"), key=lambda s: (module_of(s), s.path.stem != module_of(s), s.path.stem)):
        found.setdefault(module_of(source), []).append(source)
    return "\n\n".join([METHODS, *(part for name, files in found.items() for part in method(name, files))]) + "\n"


def method(name: str, files: list[Source]) -> Iterator[str]:
    """Yield the parts of the section of one method: its own YAML file first, then its variants."""
    module = importlib.import_module(f"fedcross.strategies.{name}")
    kind: Any = next(v for k, v in vars(module).items() if inspect.isclass(v) and k.lower() == name.replace("_", ""))
    yield f"## {name}"
    options = "{members: false, show_root_heading: false, show_root_toc_entry: false}"
    yield f"::: fedcross.strategies.{name}.{kind.__name__}\n    options: {options}"
    rows = list(settings(kind.Params, "method.", files[0]))
    yield table(rows) if rows else "No settings of its own."
    if len(files) > 1:
        lines = ["| variant | is | sets |", "|---|---|---|"]
        yield "\n".join([*lines, *(variant(file, files[0]) for file in files[1:])])


def variant(source: Source, base: Source) -> str:
    """Return the table row of a variant: a YAML file that presets some settings of the method."""
    changed: Mapping[str, Any] = {
        name: value
        for name, value in source.values.items()
        if name not in ("name", "module") and base.values.get(name) != value
    }
    sets = ", ".join(f"`{name}: {flow(value)}`" for name, value in changed.items())
    return f"| `method={source.path.stem}` | {says(source)} | {sets} |"


def pages() -> dict[Path, str]:
    """Return what each page should hold."""
    return {PAGES / "settings.md": settings_page(), PAGES / "methods.md": methods_page()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
