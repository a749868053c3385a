"""The Flower app folder of fedcross, wherever fedcross is installed.

``flwr run`` bundles a folder with a ``pyproject.toml``. A checkout is one; an installed wheel is not, and a checkout
may hold much that must not travel. So the engines hand Flower a fresh folder: our packages, nothing else.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.errors import FederationError

PACKAGES = ("analysis", "client", "conf", "deploy", "engines", "server", "strategies", "tasks")
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
serverapp = "server.app:app"
clientapp = "client.app:app"

[tool.flwr.app.config]
overrides = ""
"""


def make(target: Path, root: Path | None = None) -> Path:
    """Copy the packages into the new folder `target`, add its ``pyproject.toml``, and return `target`.

    Parameters
    ----------
    target : Path
        Must not exist.
    root : Path, optional
        Where the packages are; default: where this module is (a checkout or ``site-packages``).

    Raises
    ------
    FederationError
        If a package is missing.
    """
    root = root or Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        if not (root / package / "__init__.py").is_file():
            raise FederationError(f"{root / package}: this part of fedcross is missing. Install fedcross again.")
        shutil.copytree(root / package, target / package, ignore=_unwanted)
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
