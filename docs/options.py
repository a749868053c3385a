"""Every setting of the configuration: its default, its range, its meaning.

The default is what ``conf/*.yaml`` says, the range what the settings class checks. The meaning is the first found of:
``Field(description=...)``, the comment behind the YAML line, the class's docstring, the comment above the YAML line.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedcross.strategies.parts.schedule import Schedule

KEY = re.compile(
    r"^(\s*)([A-Za-z_]\w*):(?:\s+(?P<value>[^#\s\[{\"'][^#]*?|\".*?\"|'.*?'|\[.*?\]|\{.*\}))?\s*(?:#\s?(?P<says>.*))?$"
)
ENTRY = re.compile(r"^(\w+(?:, \w+)*) : .*\n((?:    .*\n|\n)+)", re.MULTILINE)
WORDS = {int: "whole number", float: "number", str: "text", Path: "path", bool: "`true`, `false`", type(None): "`null`"}
SCHEDULE = "number, or a schedule"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """One row of a table: the dotted `name`, the `default` as YAML, the allowed `span`, the `meaning`."""

    name: str
    default: str
    span: str
    meaning: str


@dataclass(frozen=True)
class Source:
    """A YAML file: its first comment, its values, and the comments behind and above each key."""

    path: Path
    header: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    above: Mapping[str, str] = field(default_factory=dict)


def read(path: Path) -> Source:
    """Return YAML file `path` with its comments; values of the files in its ``defaults`` list come first."""
    text = path.read_text()
    own = yaml.safe_load(text) or {}
    values: dict[str, Any] = {}
    for parent in own.pop("defaults", []):
        if isinstance(parent, str) and parent != "_self_":
            values |= read(path.with_name(f"{parent}.yaml")).values
    beside, above = comments(text)
    header = text.partition("\n")[0].removeprefix("#").strip() if text.startswith("#") else ""
    return Source(path, header, values | own, beside, above)


def comments(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the comments behind each key of YAML `text`, and those above each, by dotted name."""
    beside: dict[str, str] = {}
    above: dict[str, str] = {}
    way: list[tuple[int, str]] = []
    waiting: list[str] = []
    name = ""
    for line in text.partition("\n")[2].splitlines():
        if found := KEY.match(line):
            depth = len(found.group(1))
            way = [(d, key) for d, key in way if d < depth] + [(depth, found.group(2))]
            name = ".".join(key for _, key in way)
            if found["says"]:
                beside[name] = found["says"].strip()
            if waiting:
                above[name] = " ".join(waiting)
            waiting = []
        elif re.match(r"^ {10,}#", line) and name in beside:
            beside[name] += " " + line.strip("# ")
        elif line.startswith("#"):
            waiting.append(line.strip("# "))
        else:
            waiting = []
    return beside, above


def meanings(kind: type) -> dict[str, str]:
    """Return what the docstrings of `kind` and its bases say of each setting: an entry, or a sentence that names it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = inspect.cleandoc(base.__dict__.get("__doc__") or "") + "\n"
        prose = " ".join(ENTRY.sub("", doc).split())
        for sentence in re.split(r"(?<=[.;]) ", prose):
            found.update((name, sentence) for name in re.findall(r"``(\w+)``", sentence))
        for names, body in ENTRY.findall(doc):
            found.update((name, " ".join(body.split())) for name in names.split(", "))
    return found


def settings(
    kind: type[BaseModel], prefix: str, source: Source, inside: str = "", skip: Collection[str] = ()
) -> Iterator[Setting]:
    """Yield the settings of class `kind`, nested ones too, but for the fields in `skip`.

    `prefix` stands before the name on the command line (``train.``); `inside` is where `kind` stands in the YAML file
    `source`, dotted, with a dot at the end.
    """
    texts = meanings(kind)
    for name, info in kind.model_fields.items():
        place = inside + name
        if name in skip or (name == "name" and get_origin(info.annotation) is not Literal):
            continue
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings(info.annotation, f"{prefix}{name}.", source, f"{place}.")
            continue
        meaning = info.description or source.beside.get(place) or texts.get(name) or source.above.get(place) or ""
        values = span(info.annotation, info.metadata)
        if info.examples and values == SCHEDULE:  # of words
            values = f"{', '.join(f'`{word}`' for word in info.examples)}, or a schedule of them"
        yield Setting(prefix + name, default(info, source.values, place), values, meaning)


def default(info: FieldInfo, values: Mapping[str, Any], place: str) -> str:
    """Return the default of the setting at `place` as YAML: the file's, else the class's; "required" if neither."""
    node: Any = values
    for part in place.split("."):
        if not isinstance(node, Mapping) or part not in node:
            node = info.get_default(call_default_factory=True) if not info.is_required() else "???"
            break
        node = node[part]
    if node == "???":
        return "required"
    return f"`{flow(node.model_dump() if isinstance(node, BaseModel) else node)}`"


def flow(value: Any) -> str:
    """Return `value` as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def span(kind: Any, metadata: Any = ()) -> str:
    """Return in words which values `kind` allows under the bounds in `metadata`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return span(inner[0], [*inner[1:], *metadata])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        if kind == get_args(Schedule)[0]:
            return SCHEDULE
        parts = [span(part, metadata if part is not type(None) and part is not bool else ()) for part in inner]
        listed = [part for part in dict.fromkeys(parts) if part.startswith("`")]
        return " or ".join([part for part in parts if not part.startswith("`")] + [", ".join(listed)] * bool(listed))
    if origin in (tuple, list):
        return f"list of {span(inner[0])}"
    if origin is dict or kind is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "mapping"
    flat = [one for entry in metadata for one in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    limits = [f"{sign} {getattr(one, a):g}" for one in flat for a, sign in BOUNDS.items() if hasattr(one, a)]
    return " ".join([WORDS.get(kind, "any value"), *([", ".join(limits)] if limits else [])])
