"""Folders of the fedcross package on this machine, and those of a user's own code, named in ``FEDCROSS_PATH``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import fedcross
from fedcross.core.errors import ConfigError, nearest

#: The subpackages of ``fedcross``.
ROOMS = ("analysis", "client", "conf", "core", "deploy", "engines", "server", "strategies", "tasks")
#: Those that a Flower app carries to other machines: what only the commands use stays at home.
APP_ROOMS = tuple(name for name in ROOMS if name not in ("analysis", "deploy"))
#: Environment variable: folders, separated as in ``PATH``, with a user's ``strategies/``, ``tasks/`` and ``conf/``.
PLUGIN_VARIABLE = "FEDCROSS_PATH"


def import_root() -> Path:
    """Return the folder in which ``import fedcross`` finds the package: the checkout, or ``site-packages``."""
    return Path(fedcross.__file__).resolve().parent.parent


def room(name: str, root: Path | None = None) -> Path:
    """Return the folder of subpackage `name` below `root` (default: :func:`import_root`).

    In a checkout it lies beside the folder ``fedcross``, in a wheel inside it.
    """
    root = root or import_root()
    beside = root / name
    return beside if (beside / "__init__.py").is_file() else root / "fedcross" / name


def page(name: str) -> str:
    """Return where a reader finds page `name` of the folder ``docs``: its path in a checkout; a wheel has no pages."""
    path = import_root() / "docs" / name
    return str(path) if path.exists() else f"docs/{name} in fedcross's source"


def named_folders() -> list[Path]:
    """Return the folders that :data:`PLUGIN_VARIABLE` names, there or not; one that is named twice counts once."""
    names = os.environ.get(PLUGIN_VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys(Path(name).expanduser().resolve() for name in names if name))


def extra_folders(package: str) -> list[str]:
    """Return the folders that the user's plug-ins add to `package` (``strategies``, ``tasks``, ``tasks.models``...)."""
    folders = (root.joinpath(*package.split(".")) for root in named_folders())
    return [str(folder) for folder in folders if folder.is_dir()]


def own_object(path: str, setting: str) -> Any:
    """Import ``package.module:name`` and return what it names; for classes of a user's own.

    The module may lie in a folder of ``FEDCROSS_PATH`` or in the working folder. Processes that this one starts later
    find it too: its folder is then added to ``PYTHONPATH``.

    Parameters
    ----------
    path : str
        Import path of the module, a colon, the name in it.
    setting : str
        Name of the setting that holds `path`, for messages.

    Raises
    ------
    ConfigError
        If `path` is not of this form, the module does not exist or cannot be imported, or it lacks the name.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigError(f"{setting}={path!r}: not an import path. Write package.module:Class.")
    folders = [*named_folders(), Path().resolve()]
    _find(module_name.partition(".")[0], folders)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module can raise anything
        said = f"{module_name} cannot be imported ({type(error).__name__}: {error}). Correct it."
        if isinstance(error, ModuleNotFoundError):
            said = f"{module_name} imports {error.name}, which is not installed. Install it."
            if f"{module_name}.".startswith(f"{error.name}."):
                where = ", ".join(map(str, folders))
                said = (
                    f"there is no module {error.name}. Looked among the installed packages and in {where}. Correct "
                    f"the path, or name the folder above it in {PLUGIN_VARIABLE}."
                )
        raise ConfigError(f"{setting}={path!r}: {said}") from error
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise ConfigError(f"{setting}={path!r}: {module.__file__} has no {name}. {nearest(name, known)}")
    return getattr(module, name)


def _find(top: str, folders: list[Path]) -> None:
    """Add the first of `folders` that holds module `top` to the end of Python's path, unless `top` is installed."""
    if top in sys.modules or importlib.util.find_spec(top):
        return
    for folder in folders:
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            sys.path.append(str(folder))
            before = os.environ.get("PYTHONPATH", "")
            os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (before, str(folder)) if part)
            return
