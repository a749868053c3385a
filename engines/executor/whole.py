"""Has Flower unpack an app bundle whole or not at all.

Flower copies a bundle's files into a folder that is named after the bundle, and takes that folder as it is if it is
there. A second run that starts while the first one's files are copied then loads half an app and fails; after a process
was killed while it copied, or a disk was full, every later run does. Here the files are copied beside the place, and
the folder is moved there when it is complete.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

#: Flower's module and its function that copies an unpacked bundle's files.
MODULE, FUNCTION = "flwr.cli.install", "validate_and_install"
#: How a folder beside the place is called; what a killed process leaves is never taken for an app.
PREFIX = ".unpacked-"


def whole(install: Callable[..., Path]) -> Callable[..., Path]:
    """Return Flower's function `install`, which then shows no incomplete folder to other processes."""
    flower: Any = import_module(MODULE)

    @functools.wraps(install)
    def call(project: Path, digest: str, name: str | None, folder: Path | None, *more: Any, **settings: Any) -> Path:
        base: Path = folder.expanduser() if folder else flower.get_flwr_home()
        apps: Path = base / flower.APP_DIR
        if any(apps.glob(f"*.{digest[: flower.FAB_HASH_TRUNCATION]}")):
            return install(project, digest, name, folder, *more, **settings)  # Flower takes what is there, or asks
        apps.mkdir(parents=True, exist_ok=True)
        said = io.StringIO()
        # On the same file system: a move, which is not a copy.
        with tempfile.TemporaryDirectory(dir=base, prefix=PREFIX) as beside:
            with redirect_stdout(said):
                made = install(project, digest, name, Path(beside), *more, **settings)
            place = apps / made.name
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # else another process was faster
                    raise
        print(said.getvalue().replace(beside, str(base)), end="", flush=True)
        return place

    return call


def attach() -> None:
    """Replace Flower's function in this process, once."""
    module: Any = import_module(MODULE)
    found = getattr(module, FUNCTION)
    if not hasattr(found, "__wrapped__"):
        setattr(module, FUNCTION, whole(found))
