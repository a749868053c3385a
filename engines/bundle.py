"""Makes the Flower app folder of fedcross, from a checkout or an installed wheel.

``flwr run`` bundles a folder with a ``pyproject.toml``. An installed wheel has none, and a checkout may hold files that
must not be sent to other machines. So the engines give Flower a new folder that holds only the packages that the apps
of fedcross use.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedcross.core.errors import FederationError, StorageError
from fedcross.core.paths import APP_ROOMS, import_root, room
from fedcross.engines.flower import executable

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
serverapp = "fedcross:server_app"
clientapp = "fedcross:client_app"

[tool.flwr.app.config]
overrides = ""
"""


def make(target: Path, root: Path | None = None) -> Path:
    """Copy the package, laid out as in a wheel, and a ``pyproject.toml`` into the new folder `target`; return it.

    Parameters
    ----------
    target : Path
        Must not exist.
    root : Path, optional
        A checkout or ``site-packages``; default: the one from which this process imported fedcross.

    Raises
    ------
    FederationError
        If a package is missing.
    StorageError
        If it cannot be written: the disk is full, say.
    """
    try:
        return _copied(target, root or import_root())
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # the first of many files
        raise StorageError(f"{target}: the run's app cannot be written there ({why}).") from error


def _copied(target: Path, root: Path) -> Path:
    for name in APP_ROOMS:
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


def build(app: Path, folder: Path, environment: Mapping[str, str]) -> Path:
    """Bundle the Flower app in folder `app` with ``flwr build``; return the new file in `folder`.

    Raises
    ------
    FederationError
        If Flower refuses the app.
    """
    command = [executable("flwr"), "build", "--app", str(app)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.fab"))
    if done.returncode != 0 or len(found) != 1:
        raise FederationError(f"{app}: flwr build failed.\n{done.stderr[-2000:]}{done.stdout[-2000:]}")
    return found[0]
