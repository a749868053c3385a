"""Words for faults in settings: which setting, the value seen, what it must be.

pydantic reports a fault by the class it tried, one report for every member of a union. Here the reports about one
setting become one sentence in the words of the command line.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedcross.core.errors import nearest

#: What a configuration file says in place of a value that the user must give.
MISSING = "???"
LONGEST = 80
PLAIN = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}


def sentences(kind: type[BaseModel], values: Mapping[str, Any], where: str, error: ValidationError) -> dict[str, str]:
    """Return one sentence for each setting of `kind` that `error` reports, by its name inside `kind`.

    Parameters
    ----------
    kind : type
        The settings class.
    values : mapping
        What it was to be made of.
    where : str
        The group, such as ``method``; empty at the top.
    error : ValidationError
        pydantic's report.
    """
    found: dict[str, str] = {}
    for fault in error.errors():
        loc = fault["loc"]
        place, value = _place(values, loc)
        if fault["type"] == "extra_forbidden":
            owner = _owner(kind, place[:-1])
            text = f"unknown setting. {nearest(str(place[-1]), list(owner.model_fields))}"
        elif fault["type"] == "missing":
            place, text = (*place, loc[-1]), "this setting is required."
        elif value is None and fault["type"] == "path_type":
            found[_name(place, "")] = required(kind, str(place[-1]), where)
            continue
        elif fault["type"] in ("value_error", "assertion_error"):
            message = fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
            text = f"{message}."
            if named := _named(_owner(kind, place), message, value):
                found.setdefault(_name((*place, named), ""), f"{_name((*place, named), where)}{text[len(named) :]}")
                continue
        else:
            text = f"must be {allowed(kind, place)}.{_as_list(kind, place, where, value)}"
        wrong = fault["type"] not in ("extra_forbidden", "missing") and place and not _is_long(value)
        name = _name(place, where)
        found.setdefault(_name(place, ""), f"{name}={shown(value)}: {text}" if wrong else f"{name}: {text}")
    return found


def truths(kind: type[BaseModel], values: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return one sentence for each true or false where a number is meant; pydantic would read them as 1 and 0."""
    found: dict[str, str] = {}
    for name, info in kind.model_fields.items():
        value = values.get(name)
        members = list(_members(info.annotation))
        if isinstance(value, bool) and any(part in (int, float) for part in members) and bool not in members:
            found[name] = f"{_name([name], where)}={shown(value)}: must be {allowed(kind, [name])}."
        if isinstance(value, Mapping) and isinstance(members[0], type) and issubclass(members[0], BaseModel):
            inner = truths(members[0], value, _name([name], where))
            found |= {f"{name}.{below}": text for below, text in inner.items()}
    return found


def shown(value: Any) -> str:
    """Return `value` as it is written on the command line, shortened if it is long."""
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, str):
        text = value if value and value == value.strip() else repr(value)
    elif isinstance(value, list | tuple):
        text = f"[{','.join(shown(one) for one in value)}]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name}: {shown(one)}" for name, one in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _named(kind: type[BaseModel], message: str, value: Any) -> str:
    """Return the setting of `kind` with which `message`, about several of them, begins; empty if with none.

    `value` is what is wrong: all settings of `kind`, or one of them.
    """
    first = re.match(r"\w+", message)
    named = first is not None and isinstance(value, Mapping) and first.group() in kind.model_fields
    return first.group() if first is not None and named else ""


def _is_long(value: Any) -> bool:
    """Return whether `value` is a whole group of settings, which would be cut off where it gets interesting."""
    return isinstance(value, Mapping) and shown(value).endswith("...")


def _name(place: Sequence[str | int], where: str) -> str:
    return ".".join(map(str, (where, *place) if where else place))


def _place(values: Any, loc: Sequence[str | int]) -> tuple[tuple[str | int, ...], Any]:
    """Return the path to the faulty value in what the user gave, and that value.

    pydantic's path also names the members of unions that it tried; those are not in what was given.
    """
    place: list[str | int] = []
    node = values
    for part in loc:
        entry = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
        if entry or (isinstance(node, Mapping) and part in node):
            node = node[part]
            place.append(part)
    return tuple(place), node


def required(kind: type[BaseModel], name: str, where: str) -> str:
    """Return the sentence about the setting `name` of `kind`, which has no default and was not given."""
    info = field(kind, [name])
    example = info.examples[0] if info is not None and info.examples else "VALUE"
    return f"{_name([name], where)}: this setting is required. Write {_name([name], where)}={example}."


def _as_list(kind: type[BaseModel], place: Sequence[str | int], where: str, value: Any) -> str:
    """Return how to write a single value as a list, where a list is needed."""
    info = field(kind, place)
    lists = info is not None and any(get_origin(part) in (tuple, list) for part in _members(info.annotation))
    single = isinstance(value, int | float | str) and not isinstance(place[-1], int)
    return f" Write {_name(place, where)}=[{shown(value)}]." if lists and single else ""


def _members(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, or `kind` itself, without annotations."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _members(inner[0])
    elif origin in (Union, types.UnionType):
        for part in inner:
            yield from _members(part)
    else:
        yield kind


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes that a value of `kind` may be, also as an entry of a list."""
    for part in _members(kind):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        elif get_origin(part) in (tuple, list):
            yield from _models(get_args(part)[0])


def _owner(kind: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """Return the settings class at `place` below `kind`."""
    info = field(kind, place)
    return next(_models(info.annotation), kind) if info is not None else kind


def field(kind: type[BaseModel], place: Sequence[str | int]) -> FieldInfo | None:
    """Return the field at `place` below `kind`; None if there is none, as inside a mapping of any content."""
    found: FieldInfo | None = None
    owners: list[type[BaseModel]] = [kind]
    for part in place:
        if isinstance(part, int):
            continue
        found = next((owner.model_fields[part] for owner in owners if part in owner.model_fields), None)
        if found is None:
            return None
        owners = list(_models(found.annotation))
    return found


def allowed(kind: type[BaseModel], place: Sequence[str | int]) -> str:
    """Return in words which values the setting at `place` below `kind` takes."""
    info = field(kind, place)
    if info is None:
        return "another value"
    if info.examples:
        return f"written as {_either([str(example) for example in info.examples])}"
    if place and isinstance(place[-1], int):  # an entry of a list
        inner = [get_args(part)[0] for part in _members(info.annotation) if get_origin(part) in (tuple, list)]
        return span(inner[0]) if inner else "another value"
    return span(info.annotation, info.metadata)


def span(kind: Any, limits: Sequence[Any] = ()) -> str:
    """Return in words which values `kind` allows under pydantic's `limits`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return span(inner[0], [*_flat(inner[1:]), *limits])
    if origin is Literal:
        return _either([shown(value) for value in inner])
    if origin in (Union, types.UnionType):
        if any(getattr(part, "__name__", "") == "Constant" for part in inner):
            return SCHEDULE
        words = dict.fromkeys(span(part, limits) for part in inner if part is not type(None))
        return _either([*(["null"] if type(None) in inner else []), *words])
    if origin in (tuple, list):
        return f"a list, with each entry {span(inner[0])}" if inner else "a list"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        choices = kind.__pydantic_generic_metadata__["args"]
        return f"{span(choices[0])}, or a schedule of these" if choices else "a group of settings"
    if origin is dict or kind is dict:
        return "a mapping such as {NAME: VALUE}"
    return PLAIN.get(kind, "another value") + _bounds(limits)


SCHEDULE = "a number, or a schedule such as {schedule: linear, start: 0.5, end: 0.99, rounds: 100}"


def _bounds(limits: Sequence[Any]) -> str:
    """Return the bounds in words: ``, 1 or more``."""
    of = {name: getattr(one, name) for one in limits for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    words = {"ge": "{:g} or more", "gt": "above {:g}", "le": "at most {:g}", "lt": "below {:g}"}
    if {"ge", "le"} <= of.keys():
        return f" from {of['ge']:g} to {of['le']:g}"
    text = " and ".join(words[name].format(of[name]) for name in words if name in of)
    return f"{',' if 'ge' in of else ''} {text}" if text else ""


def _flat(metadata: Sequence[Any]) -> list[Any]:
    return [one for entry in metadata for one in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _either(words: Sequence[str]) -> str:
    return " or ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} or {words[-1]}"
