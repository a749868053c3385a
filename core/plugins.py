"""Folders of a user's own methods, tasks, models and settings, named in ``FEDCROSS_PATH``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcross.core.errors import ConfigError, nearest

#: Environment variable: folders, separated as in ``PATH``, with a user's ``strategies/``, ``tasks/`` and ``conf/``.
PLUGIN_VARIABLE = "FEDCROSS_PATH"


def extra_folders(package: str) -> list[str]:
    """Return the folders that the user's plug-ins add to `package` (``strategies``, ``tasks``, ``tasks.models``...)."""
    folders = (root.joinpath(*package.split(".")) for root in named_folders())
    return [str(folder) for folder in folders if folder.is_dir()]


def named_folders() -> list[Path]:
    """Return the folders that :data:`PLUGIN_VARIABLE` names, there or not; one that is named twice counts once."""
    names = os.environ.get(PLUGIN_VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys(Path(name).expanduser().resolve() for name in names if name))


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
    module = _own_module(module_name, f"{setting}={path!r}")
    found = getattr(module, name, None)
    if found is None:
        known = [word for word in vars(module) if not word.startswith("_")]
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{setting}={path!r}: {where} has no {name}. {nearest(name, known)}")
    return found


def _own_module(name: str, given: str) -> ModuleType:
    """Import module `name`, looking in the user's folders last; `given` is the setting with its value."""
    top = name.partition(".")[0]
    folder = None if top in sys.modules or importlib.util.find_spec(top) else _folder_of(top)
    if folder is not None:
        sys.path.append(folder)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (before, folder) if part)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{given}: {name} imports {error.name}, which is not installed. Install it.") from error
        folders = ", ".join(_user_folders())
        raise ConfigError(
            f"{given}: there is no module {error.name}. Looked among the installed packages and in {folders}. Correct "
            f"the path, or name the folder above {top} in {PLUGIN_VARIABLE}."
        ) from error
    except Exception as error:  # a user's module can raise anything
        raise ConfigError(f"{given}: {name} cannot be imported ({type(error).__name__}: {error}). Mend it.") from error


def _user_folders() -> list[str]:
    return [str(folder) for folder in (*named_folders(), Path().resolve())]


def _folder_of(top: str) -> str | None:
    """Return the first of the user's folders that holds the package or module `top`."""
    for folder in map(Path, _user_folders()):
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return str(folder)
    return None
