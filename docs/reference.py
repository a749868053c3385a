"""Writes the reference pages, ``docs/reference/*.md``, from the code and ``conf/``: ``python -m docs.reference``.

``make docs`` runs it before the site is built; a test fails if a committed page is not what it would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.api import MADE, api_page, module, nested, table
from docs.docstrings import described, markdown, plain, sections
from docs.options import Setting, Source, flow, read, settings
from fedcross.core.causes import CAUSES

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
PAGES = ROOT / "docs" / "reference"
#: Groups of the settings page, in order.
GROUPS = ("task", "partition", "model", "engine")
# ---- settings -----------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Return the page of all settings but the methods'."""
    schema = module("fedcross.conf.schema")
    source = read(CONF / "config.yaml")
    parts = [
        MADE,
        "# Settings\n\nA setting is given on the command line as `NAME=VALUE`, or to `fedcross.run` as one text each. "
        "`A=B` for a group such as `task` or `method` chooses the file `conf/A/B.yaml`. The settings of the methods "
        "have [a page of their own](methods.md). `fedcross --cfg job` shows the configuration that a command gives.",
        "## The run",
        table(plain_settings(schema.RunConfig, source)),
    ]
    for name, info in schema.RunConfig.model_fields.items():
        kind = info.annotation
        if name in source.values and name not in (*schema.PACKAGES, "logger", "attack") and nested(kind):
            first = sections(kind.__doc__)[""]
            parts += [f"## {name}", markdown(first), table(settings(kind, f"{name}.", source, f"{name}."))]
    for group in GROUPS:
        parts += [f"## {group}", *group_section(group)]
    for group in ("clock", "devices"):
        parts += [f"## {group}", *choice_section(group, schema.RunConfig.model_fields[group].annotation)]
    parts += ["## attack", *attack_section(schema.Attack), "## logger", *logger_section()]
    return "\n\n".join(parts) + "\n"


def plain_settings(kind: type[BaseModel], source: Source) -> Iterator[Setting]:
    """Yield the settings that stand at the top of the configuration."""
    other = {name for name, info in kind.model_fields.items() if nested(info.annotation) or name not in source.values}
    return settings(kind, "", source, skip=other)


def sources(group: str) -> list[Source]:
    """Return the YAML files of a group, in alphabetical order."""
    return [read(path) for path in sorted((CONF / group).glob("*.yaml"))]


def module_of(source: Source) -> str:
    """Return the name of the module that implements the option in `source`."""
    return str(source.values.get("module", source.values.get("name", source.path.stem)))


def says(source: Source) -> str:
    """Return the explanation in the first comment of a YAML file, after the command that it starts with."""
    _, _, text = source.header.partition("  ")
    return text.strip()


def first_sentence(doc: str | None) -> str:
    """Return the first sentence of a docstring on one line."""
    return plain(" ".join(sections(doc)[""].split("\n\n")[0].split())).partition(". ")[0].rstrip(".")


def group_section(group: str) -> list[str]:
    """Return the options of `group`, then their settings: those of several options once, under their common class."""
    schema = module("fedcross.conf.schema")
    owners: dict[type[BaseModel], dict[str, list[tuple[str, Setting]]]] = {}
    options = ["| option | is | settings |", "|---|---|---|"]
    for source in sources(group):
        kind = schema.settings_class(group, module_of(source))
        rows = list(settings(kind, f"{group}.", source if source.path.stem == module_of(source) else parent(source)))
        own = []
        for row in rows:
            owner = owner_of(kind, row.name.split(".")[1])
            owners.setdefault(owner, {}).setdefault(row.name, []).append((source.path.stem, row))
            own.append(f"`{row.name.split('.', 1)[1]}`")
        text = says(source) or first_sentence(module(f"{schema.PACKAGES[group]}.{module_of(source)}").__doc__)
        options.append(f"| `{group}={source.path.stem}` | {text.replace('|', '/')} | {', '.join(own)} |")
    parts = ["\n".join(options)]
    for found in owners.values():
        names = dict.fromkeys(name for uses in found.values() for name, _ in uses)
        parts += [f"**{', '.join(f'`{name}`' for name in names)}**", table(merged(uses) for uses in found.values())]
    if group == "task":
        augment = module("fedcross.tasks.augment").Augment
        parts += ["**`task.augment`** of pictures", table(settings(augment, "task.augment.", EMPTY))]
    return parts


EMPTY = Source(Path("none"), "", {}, {}, {})


def parent(source: Source) -> Source:
    """Return `source` with the comments of the file that its module is named after."""
    base = read(source.path.with_name(f"{module_of(source)}.yaml"))
    return Source(source.path, source.header, source.values, {**base.beside, **source.beside}, base.above)


def owner_of(kind: type[BaseModel], name: str) -> type[BaseModel]:
    """Return the class in whose body field `name` stands."""
    return next(base for base in reversed(kind.__mro__) if name in getattr(base, "__annotations__", {}))


def merged(uses: list[tuple[str, Setting]]) -> Setting:
    """Return one row for the same setting of several options; where their defaults differ, the row names them."""
    rows = [row for _, row in uses]
    common, _ = Counter(row.default for row in rows).most_common(1)[0]
    if all(row.default == common for row in rows):
        return rows[0]
    by: dict[str, list[str]] = {}
    for option, row in uses:
        by.setdefault(row.default, []).append(option)
    text = "; ".join(f"{value} ({', '.join(options)})" for value, options in by.items())
    return Setting(rows[0].name, text, rows[0].span, rows[0].meaning)


def choice_section(group: str, kind: type[BaseModel]) -> list[str]:
    """Return the options of `group`, whose files all have the settings of class `kind`, and those settings."""
    rows = ["| option | is |", "|---|---|"]
    rows += [f"| `{group}={source.path.stem}` | {says(source)} |" for source in sources(group)]
    text = markdown(sections(kind.__doc__)[""])
    return [text, "\n".join(rows), table(settings(kind, f"{group}.", EMPTY, skip={"name"}))]


def attack_section(kind: type[BaseModel]) -> list[str]:
    """Return the attacks and their two settings."""
    rows = ["| option | is |", "|---|---|"]
    rows += [f"| `attack={source.path.stem}` | {says(source)} |" for source in sources("attack")]
    source = Source(CONF, "", {}, read(CONF / "attack" / "scaling.yaml").beside, {})
    return [
        markdown(sections(kind.__doc__)[""]),
        "\n".join(rows),
        table(settings(kind, "attack.", source, skip={"name"})),
    ]


def logger_section() -> list[str]:
    """Return the loggers; their settings are plain text, so YAML alone says what they are."""
    rows = ["| option | setting | default | meaning |", "|---|---|---|---|"]
    for source in sources("logger"):
        own = {name: value for name, value in source.values.items() if name != "name"}
        rows += [f"| `logger={source.path.stem}` | | | {says(source)} |"]
        rows += [f"| | `logger.{name}` | `{value}` | {source.beside[name]} |" for name, value in own.items()]
    return ["\n".join(rows)]


# ---- methods ------------------------------------------------------------------------------------------------


def method_class(name: str) -> Any:
    """Return the class of method `name`: the one whose name in lower case is the file's."""
    room = module(f"strategies.{name}")
    return next(
        value
        for attribute, value in vars(room).items()
        if inspect.isclass(value) and attribute.lower() == name.replace("_", "") and value.__module__ == room.__name__
    )


def methods() -> dict[str, list[Source]]:
    """Return the YAML files of each method, its own first, then its variants."""
    found: dict[str, list[Source]] = {}
    for source in sorted(sources("method"), key=lambda s: (module_of(s), s.path.stem != module_of(s), s.path.stem)):
        found.setdefault(module_of(source), []).append(source)
    return found


def methods_page() -> str:
    """Return the page of all methods."""
    parts = [
        MADE,
        "# Methods and their settings\n\nOne section per file of `strategies/`: the paper, the equations, what the "
        "server and the clients keep (*State*), what travels (*Wire*), deviations from the paper, and every setting. "
        "[Methods](../methods.md) compares them in one table.",
    ]
    return "\n\n".join([*parts, *(method_section(name, files) for name, files in methods().items())]) + "\n"


def method_section(name: str, files: list[Source]) -> str:
    """Return the section of one method.

    Raises
    ------
    LookupError
        If the class does not say what it keeps and what travels.
    """
    kind = method_class(name)
    text = described(inspect.getdoc(kind))
    if missing := [word for word in ("State:", "Wire:") if word not in text]:
        raise LookupError(f"{name}: its docstring lacks {' and '.join(missing)}")
    for word in ("State", "Wire", "Deviations"):
        text = text.replace(f"{word}:", f"**{word}:**")
    rows = list(settings(kind.Params, "method.", files[0]))
    parts = [f"## {name}", f"`{kind.__name__}`, `strategies/{name}.py`. {text}"]
    parts.append(table(rows) if rows else "No settings of its own.")
    if len(files) > 1:
        parts.append(
            "\n".join(["| variant | is | sets |", "|---|---|---|", *(variant(f, files[0]) for f in files[1:])])
        )
    return "\n\n".join(parts)


def variant(source: Source, base: Source) -> str:
    """Return the table row of a variant: a YAML file that presets some settings of the method."""
    changed: Mapping[str, Any] = {
        name: value
        for name, value in source.values.items()
        if name not in ("name", "module") and base.values.get(name) != value
    }
    sets = [f"`{name}: {flow(value)}`" for name, value in changed.items()]
    return f"| `method={source.path.stem}` | {says(source).replace('|', '/')} | {', '.join(sets)} |"


# ---- faults -------------------------------------------------------------------------------------------------


def faults_page() -> str:
    """Return the page of causes."""
    head = (
        "# Faults and their causes\n\n"
        "A command that fails names the cause below its message (`Cause: disk_full`), `fedcross doctor` below its "
        "findings, and the structured log in `run_failed`. The message itself says what was seen and what to do. What "
        "the user called a folder is no cause. The exit code is that of the command in the third column; others that "
        "meet the same fault may end with 1 or 2, `fedcross doctor` always with 1. "
        "A command that fails never exits with 0; a device's own fault is in its log, and the run goes on without it "
        "(exit code -).\n\n"
        "| cause | what is wrong | who says it | recognised by | exit code |\n|---|---|---|---|---|"
    )
    rows = []
    for cause in CAUSES:
        words = " or ".join(f"`{one}`" for one in re.split(r"\|(?![^()]*\))", cause.words)).replace("|", "/")
        rows.append(f"| `{cause.name}` | {cause.what} | {cause.who} | {words} | {cause.exit_code or '-'} |")
    return "\n".join([head, *rows]) + "\n"


# ---- writing ------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Return what each page of the reference should hold."""
    made = {
        "settings.md": settings_page,
        "methods.md": methods_page,
        "faults.md": faults_page,
        "api.md": lambda: api_page([method_class(name).__name__ for name in methods()]),
    }
    return {PAGES / name: make() for name, make in made.items()}


def main() -> None:
    """Write every page that is not up to date; say which."""
    PAGES.mkdir(exist_ok=True)
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
