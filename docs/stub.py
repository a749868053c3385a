"""``python -m docs.stub``: writes ``fedcross/__init__.pyi``, the public names and their arguments for editors."""

from pathlib import Path
from typing import Any

import fedcross
from fedcross.strategies.flower import arguments_of

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
#: Flower's own names.
FLOWERS = "fraction_train: float", "min_train_nodes: int", "min_available_nodes: int", "fraction_evaluate: float"


def stub() -> str:
    """Return the content of the file."""
    found = HEAD
    for name in sorted(vars(fedcross)["_methods"]()):
        settings = arguments_of(getattr(fedcross, name).Method)
        own = [f"{one.name}: {one.annotation} = {_shown(one.default)}" for one in settings]
        lines = "".join(f"        {one},\n" for one in ("self", "*", *own, *(f"{one} = ..." for one in FLOWERS)))
        found += f"\nclass {name}(FlowerStrategy):\n    def __init__(\n{lines}    ) -> None: ...\n"
    return found


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return repr(value).replace("'", '"') if plain else "..."


#: The file.
PATH = Path(str(fedcross.__file__)).with_suffix(".pyi")

if __name__ == "__main__":
    PATH.write_text(stub())
