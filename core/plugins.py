"""Folders of a user's own methods, tasks, models and settings, named in ``FEDCROSS_PATH``."""

from __future__ import annotations

import os
from pathlib import Path

#: Environment variable: folders, separated as in ``PATH``, with a user's ``strategies/``, ``tasks/`` and ``conf/``.
PLUGIN_VARIABLE = "FEDCROSS_PATH"


def extra_folders(package: str) -> list[str]:
    """Return the folders that the user's plug-ins add to `package` (``strategies``, ``tasks``, ``tasks.models``...)."""
    roots = [
        Path(name).expanduser().resolve() for name in os.environ.get(PLUGIN_VARIABLE, "").split(os.pathsep) if name
    ]
    folders = (root.joinpath(*package.split(".")) for root in roots)
    return [str(folder) for folder in folders if folder.is_dir()]
