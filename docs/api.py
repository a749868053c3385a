"""The reference page of the Python API: the public names, from their docstrings."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.docstrings import described, plain
from docs.options import Setting, Source, read, settings

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "conf" / "config.yaml"
#: What stands before the names of our packages in an import: "fedcross." since they lie below one root, before nothing.
PREFIX = "fedcross."
MADE = "<!-- Made by `make docs` from the code and conf/; do not edit. -->"
#: The public names, by heading. A name whose module does not exist (yet) is left out.
PUBLIC: dict[str, list[str]] = {
    "Run, sweep, load": ["fedcross:run", "fedcross:sweep", "fedcross:load", "fedcross:Run"],
    "A method in a Flower app": [
        "fedcross.strategies.round.base:Method",
        "fedcross.strategies.round.flower_hooks:FlowerHooks",
        "fedcross.strategies.round.federation:Federation",
    ],
    "Write a method: the server": [
        "fedcross.strategies.round.contract:Contract",
        "fedcross.strategies.round.single_model:SingleModel",
        "fedcross.strategies.wire.protocol:Round",
        "fedcross.strategies.wire.protocol:Payload",
        "fedcross.strategies.wire.protocol:Upload",
        "fedcross.strategies.round.federation:State",
    ],
    "Write a method: the client": [
        "fedcross.strategies.parts.objective:Objective",
        "fedcross.strategies.parts.objective:Visit",
        "fedcross.strategies.parts.objective:Batch",
        "fedcross.strategies.parts.objective:Net",
        "fedcross.strategies.parts.objective:Trained",
        "fedcross.strategies.parts.objective:Outcome",
    ],
    "Data, settings, randomness": [
        "fedcross.tasks.base:Task",
        "fedcross.tasks.base:Partition",
        "fedcross.core.settings:Settings",
        "fedcross.core.randomness:stream",
    ],
}


def full(name: str) -> str:
    """Return the name under which module `name` of ours is imported."""
    return name if name.split(".")[0] == "fedcross" else PREFIX + name


def module(name: str) -> Any:
    """Import module `name` of ours."""
    return importlib.import_module(full(name))


def table(rows: Iterable[Setting]) -> str:
    """Return `rows` as a Markdown table."""
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for row in rows:
        meaning = plain(row.meaning).replace("|", "\\|").removesuffix(".")
        lines.append(f"| `{row.name}` | {row.default} | {row.span} | {meaning} |")
    return "\n".join(lines)


def api_page(methods: Sequence[str]) -> str:
    """Return the page of the public names; `methods` are the names of the method classes."""
    names = ", ".join(f"`{name}`" for name in methods)
    parts = [
        MADE,
        "# Python API\n\nEverything else in the packages may change without notice.",
        f"The methods are {names}: each takes its own settings ([list](methods.md)) and those of `Federation` by name, "
        "and is a Flower `Strategy`.",
    ]
    for heading, wanted in PUBLIC.items():
        found = [(name, value) for name in wanted if (value := public(name)) is not None]
        if found:
            parts += [f"## {heading}", *(entry(name, value) for name, value in found)]
    return "\n\n".join(parts) + "\n"


def public(name: str) -> Any:
    """Return the object ``module:attribute``, None where the module lies in a part of the house that is not there."""
    home, attribute = name.split(":")
    try:
        return getattr(module(home), attribute)
    except (ModuleNotFoundError, AttributeError):
        if home == "fedcross" and not PREFIX:
            return None
        raise


def entry(name: str, value: Any) -> str:
    """Return the documentation of one public object, with its public methods if it is a class."""
    home, attribute = name.split(":")
    parts = [f"### {attribute}", f"`from {full(home)} import {attribute}`"]
    if inspect.isfunction(value):
        parts.append(signature(attribute, value))
    parts.append(described(inspect.getdoc(value)))
    if nested(value) and value.model_fields:
        parts.append(table(settings(value, "", comments_of_the_configuration())))
    own = {n: f for n, f in vars(value).items() if not n.startswith("_")} if inspect.isclass(value) else {}
    for method, function in own.items():
        function = getattr(function, "__func__", function)
        if isinstance(function, property | functools.cached_property) and function.__doc__:
            parts += [f"#### {attribute}.{method}", described(function.__doc__)]
        if inspect.isfunction(function) and function.__doc__ and not nested(value):
            parts += [f"#### {attribute}.{method}", signature(method, function), described(function.__doc__)]
    return "\n\n".join(parts)


def signature(name: str, function: Any) -> str:
    """Return a function's signature as code."""
    return f"```python\n{name}{inspect.signature(function)}\n```".replace("'", "")


def comments_of_the_configuration() -> Source:
    """Return what ``conf/config.yaml`` says about settings that stand there at the top or under ``federation``."""
    beside = {name.removeprefix("federation."): text for name, text in read(CONFIG).beside.items()}
    return Source(CONFIG, "", {}, beside, {})


def nested(kind: Any) -> bool:
    """Return whether `kind` is a group of settings."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)
