"""Multi-model federated learning on Flower: FedCross, FedFusion, FedCT and the methods they are measured against.

Four names are enough for a notebook or a script, besides the methods themselves (``from fedcross import FedCross``):

- :func:`run` runs one configuration and returns a :class:`Run`,
- :func:`sweep` runs several and returns their :class:`Run` objects,
- :func:`load` opens the folder of an earlier run,
- :class:`Run` is a finished run: metrics, result, model, folder.

The folders ``strategies``, ``client`` and so on are subpackages (``fedcross.strategies``, ``fedcross.client``, ...). In
a checkout and in Flower's app bundle they lie beside this folder, in an installed wheel inside it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

_core = os.path.join(__path__[0], "core")  # noqa: PTH118 - pathlib would double the time of this import
if os.path.islink(_core) or not os.path.isdir(_core):  # noqa: PTH112, PTH114
    __path__.insert(0, os.path.dirname(os.path.abspath(__path__[0])))  # noqa: PTH100, PTH120

# A list of constants: Flower reads in it, without an import, that its two apps are here. They cannot be named as
# "fedcross.server.app:app" in pyproject.toml: Flower looks for one while another thread imports the other, and finds
# nothing in a package that is half made.
__all__ = ["ClassicFedCross", "Run", "client_app", "load", "run", "server_app", "sweep", "tell_partition"]
_ELSEWHERE = {
    **dict.fromkeys(("Run", "load", "run", "sweep"), "fedcross.server.api"),
    "ClassicFedCross": "fedcross.strategies.classic",
    "tell_partition": "fedcross.client.app",
}
#: Modules of strategies that hold no method.
_NO_METHODS = frozenset({"__init__", "classic", "flower", "method", "objective", "registry"})
_APPS = {"server_app": "fedcross.server.app", "client_app": "fedcross.client.app"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``import fedcross`` itself stays fast."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fedcross")
    if name in _APPS:
        return import_module(_APPS[name]).app
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    if (module := _methods().get(name)) is None:
        raise AttributeError(f"module 'fedcross' has no attribute {name!r}")
    method = getattr(import_module(f"fedcross.strategies.{module}"), name)
    return import_module("fedcross.strategies.flower").strategy_class(method)


def _methods() -> dict[str, str]:
    """Return the class of each method -> its module: ``strategies/NAME.py`` holds the class of that name."""
    import re

    folder = import_module("fedcross.strategies").__path__[0]
    found = {}
    for entry in os.scandir(folder):
        stem, dot, ending = entry.name.rpartition(".")
        if dot and ending == "py" and stem not in _NO_METHODS:
            with open(entry.path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib would double the import's time
                names = re.findall(r"^class (\w+)\(", file.read(), re.MULTILINE)
            found |= {name: stem for name in names if name.lower() == stem.replace("_", "")}
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_methods()]
