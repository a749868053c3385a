"""The Flower app folder of fedcross, wherever fedcross is installed.

``flwr run`` bundles a folder with a ``pyproject.toml``. A checkout is one; an installed wheel is not, and a checkout
may hold much that must not travel. So the engines hand Flower a fresh folder: our packages, nothing else.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedcross.core.errors import FederationError
from fedcross.core.paths import ROOMS, import_root, room

_SUFFIXES = frozenset({".py", ".yaml"})
_PROJECT = """[project]
name = "fedcross"
version = "{version}"
description = "Multi-model federated learning on Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedcross"

[tool.flwr.app.components]
serverapp = "fedcross.server.app:app"
clientapp = "fedcross.client.app:app"

[tool.flwr.app.config]
overrides = ""
"""


def make(target: Path, root: Path | None = None) -> Path:
    """Copy the package, laid out as in a wheel, into the new folder `target` with a ``pyproject.toml``; return it.

    Parameters
    ----------
    target : Path
        Must not exist.
    root : Path, optional
        A checkout or ``site-packages``; default: where this process has fedcross from.

    Raises
    ------
    FederationError
        If a package is missing.
    """
    root = root or import_root()
    for name in ROOMS:
        folder = room(name, root)
        if not (folder / "__init__.py").is_file():
            raise FederationError(f"{folder}: this part of fedcross is missing. Install fedcross again.")
        shutil.copytree(folder, target / "fedcross" / name, ignore=_unwanted)
    shutil.copy(root / "fedcross" / "__init__.py", target / "fedcross")
    try:
        number = version("fedcross")
    except PackageNotFoundError:
        number = "0.0.0"
    (target / "pyproject.toml").write_text(_PROJECT.format(version=number), encoding="utf-8")
    return target


def _unwanted(folder: str, names: list[str]) -> set[str]:
    return {
        name
        for name in names
        if name == "__pycache__" or (not (Path(folder) / name).is_dir() and Path(name).suffix not in _SUFFIXES)
    }
