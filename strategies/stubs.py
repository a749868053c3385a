"""Writes ``fedcross/__init__.pyi``, which tells editors and type checkers the public names and their arguments.

``python -m fedcross.strategies.stubs`` writes it anew after a change of settings.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import fedcross
from fedcross.core.settings import Settings
from fedcross.strategies.method import Method
from fedcross.strategies.parts.schedule import Constant
from fedcross.strategies.round.settings import RoundSettings

HEAD = """# Written by python -m fedcross.strategies.stubs. Do not edit.
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
#: Flower's own names.
FLOWERS = "fraction_train: float", "min_train_nodes: int", "min_available_nodes: int", "fraction_evaluate: float"


def stub() -> str:
    """Return the content of the file."""
    return HEAD + "".join(_class(name, getattr(fedcross, name).Method) for name in sorted(vars(fedcross)["_methods"]()))


def _class(name: str, method: type[Method[Any, Any]]) -> str:
    own = [f"{name}: {typed(field.annotation)} = {_default(field)}" for name, field in fields_of(method).items()]
    lines = "".join(f"        {one},\n" for one in (*own, *(f"{name} = ..." for name in FLOWERS)))
    return f"\nclass {name}(FlowerStrategy):\n    def __init__(\n        self,\n        *,\n{lines}    ) -> None: ...\n"


def fields_of(method: type[Method[Any, Any]]) -> dict[str, Any]:
    """Return the settings of a method, its own first, and those of the rounds."""
    own, inherited = method.Params.model_fields, vars(method.Params).get("__annotations__", {})
    first = {name: field for name, field in own.items() if name in inherited}
    return first | own | {name: field for name, field in RoundSettings.model_fields.items() if name not in own}


def typed(annotation: Any) -> str:
    """Return an annotation as a caller may fill it in: settings also as a mapping, schedules also as a number."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"Literal[{', '.join(map(_literal, arguments))}]"
    if origin in (Union, types.UnionType):
        kinds = dict.fromkeys(typed(one) for one in arguments)
        return "float | Mapping[str, Any]" if Constant in arguments else " | ".join(kinds)
    if origin is tuple:
        return f"tuple[{', '.join('...' if one is ... else typed(one) for one in arguments)}]"
    if hasattr(annotation, "__metadata__"):
        return typed(arguments[0])
    if annotation in (int, float, str, bool, type(None)):
        return "None" if annotation is type(None) else str(annotation.__name__)
    settings = isinstance(annotation, type) and issubclass(annotation, Settings)
    return "Mapping[str, Any] | Any" if settings else "Any"


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    value = value.value if isinstance(value, Constant) else value
    plain = value is None or isinstance(value, bool | int | float | str)
    return _literal(value) if plain or isinstance(value, tuple) else "..."


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def path() -> Path:
    """Return the file."""
    return Path(str(fedcross.__file__)).with_suffix(".pyi")


if __name__ == "__main__":
    path().write_text(stub())
