"""``python -m docs.stub``: writes ``fedcross/__init__.pyi``, the public names and their arguments for editors."""

import types
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import fedcross
from fedcross.core.settings import Settings
from fedcross.strategies.flower import arguments_of
from fedcross.strategies.parts.schedule import Schedule

HEAD = """# Written by python -m docs.stub. Do not edit.
# fmt: off
# ruff: noqa: E501
from collections.abc import Mapping
from typing import Any, Literal

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedcross.client.app import tell_partition as tell_partition
from fedcross.server.api import Run as Run
from fedcross.server.api import load as load
from fedcross.server.api import run as run
from fedcross.server.api import sweep as sweep
from fedcross.strategies.classic import ClassicFedCross as ClassicFedCross
from fedcross.strategies.flower import FlowerStrategy

__version__: str
client_app: ClientApp
server_app: ServerApp
"""
#: A schedule without what checks it.
PLAIN = get_args(Schedule)[0]
#: Flower's own names.
FLOWERS = "fraction_train: float", "min_train_nodes: int", "min_available_nodes: int", "fraction_evaluate: float"


def stub() -> str:
    """Return the content of the file."""
    found = HEAD
    for name in sorted(vars(fedcross)["_methods"]()):
        settings = arguments_of(getattr(fedcross, name).Method)
        own = [f"{one.name}: {typed(one)} = {_shown(one.default)}" for one in settings]
        lines = "".join(f"        {one},\n" for one in ("self", "*", *own, *(f"{one} = ..." for one in FLOWERS)))
        found += f"\nclass {name}(FlowerStrategy):\n    def __init__(\n{lines}    ) -> None: ...\n"
    return found


def typed(setting: Parameter) -> str:
    """Return what a caller may give for `setting`; a schedule is a number, or a word where its default is one."""
    kind = _typed(setting.annotation)
    return kind.replace("float", "str") if "Mapping" in kind and isinstance(setting.default, str) else kind


def _typed(annotation: Any) -> str:
    """Return an annotation as a caller may fill it in: settings also as a mapping, schedules also as a number."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"Literal[{', '.join(map(_shown, arguments))}]"
    if origin in (Union, types.UnionType):
        kinds = dict.fromkeys(_typed(one) for one in arguments)
        return "float | Mapping[str, Any]" if annotation == PLAIN else " | ".join(kinds)
    if origin is tuple:
        return f"tuple[{', '.join(map(_typed, arguments))}]"
    if hasattr(annotation, "__metadata__"):
        return _typed(arguments[0])
    if annotation in (names := {int: "int", float: "float", str: "str", bool: "bool", type(None): "None", ...: "..."}):
        return names[annotation]
    settings = isinstance(annotation, type) and issubclass(annotation, Settings)
    return "Mapping[str, Any] | Any" if settings else "Any"


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return repr(value).replace("'", '"') if plain else "..."


#: The file.
PATH = Path(str(fedcross.__file__)).with_suffix(".pyi")

if __name__ == "__main__":
    PATH.write_text(stub())
