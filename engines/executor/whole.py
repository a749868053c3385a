"""Has Flower unpack an app bundle whole or not at all.

Flower copies a bundle's files into a folder that is named after the bundle, and takes that folder as it is if it is
there. A second run that starts while the first one's files are copied then loads half an app and fails; after a process
was killed while it copied, or a disk was full, every later run does. Here the files are copied beside the place, and
the folder is moved there when it is complete. Half a folder that Flower left, untouched for a while, makes room.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

#: Flower's module and its function that copies an unpacked bundle's files.
MODULE, FUNCTION = "flwr.cli.install", "validate_and_install"
#: How a folder beside the place is called; what a killed process leaves is never taken for an app.
PREFIX = ".unpacked-"
#: A file on which processes wait for each other.
LOCK = ".lock"
#: Seconds after which nobody works on a folder beside the place, or on half an app, any more.
STALE_S = 3600.0


def whole(install: Callable[..., Path], now: Callable[[], float] = time.time) -> Callable[..., Path]:
    """Return Flower's function `install`, which then shows no incomplete folder to other processes."""
    flower: Any = import_module(MODULE)

    @functools.wraps(install)
    def call(project: Path, digest: str, name: str | None, folder: Path | None, *more: Any, **settings: Any) -> Path:
        apps: Path = (folder.expanduser() if folder else flower.get_flwr_home()) / flower.APP_DIR
        apps.mkdir(parents=True, exist_ok=True)
        _sweep(apps, now())
        there = list(apps.glob(f"*.{digest[: flower.FAB_HASH_TRUNCATION]}"))
        if any(_is_whole(one, project) or _touched(one, now()) > now() - STALE_S for one in there):
            return install(project, digest, name, folder, *more, **settings)  # Flower takes what is there, or asks
        said = io.StringIO()
        # Below `apps`, which may be a link: on the same file system, where a move is not a copy.
        with tempfile.TemporaryDirectory(dir=apps, prefix=PREFIX, ignore_cleanup_errors=True) as beside:
            try:
                with redirect_stdout(said):
                    made = install(project, digest, name, Path(beside), *more, **settings)
            finally:
                print(said.getvalue().replace(f"{beside}{os.sep}{flower.APP_DIR}", str(apps)), end="", flush=True)
            place = apps / made.name
            with _alone(apps):
                if _is_whole(place, project):  # another process was faster
                    return place
                for half in there:
                    with suppress(FileNotFoundError):
                        half.rename(Path(beside) / f"half-{half.name}")
                made.rename(place)
        return place

    return call


@contextmanager
def _alone(apps: Path) -> Iterator[None]:
    """Let no other process of this machine look and move at the same time (POSIX; elsewhere nothing is done)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (apps / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(place: Path, project: Path) -> bool:
    """Return whether `place` has every file of the unpacked bundle `project`, as large as there."""
    files = [path for path in project.rglob("*") if path.is_file()]
    try:
        return all((place / path.relative_to(project)).stat().st_size == path.stat().st_size for path in files)
    except OSError:
        return False


def _touched(place: Path, now: float) -> float:
    """Return when something in `place` was changed last; 0 if it has gone.

    A time somewhat after `now` is that of a process at work since; one long after it is a wrong clock's.
    """
    times = [0.0]
    names = [place, *(Path(folder, name) for folder, below, files in os.walk(place) for name in (*below, *files))]
    for path in names:  # any of them may vanish meanwhile
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(time for time in times if time <= now + STALE_S)


def _sweep(apps: Path, now: float) -> None:
    """Delete what killed processes left beside the apps and nobody has touched for a while."""
    for left in apps.glob(f"{PREFIX}*"):
        if _touched(left, now) < now - STALE_S:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                with suppress(OSError):
                    left.unlink()


def attach() -> None:
    """Replace Flower's function in this process, once."""
    module: Any = import_module(MODULE)
    found = getattr(module, FUNCTION)
    if not hasattr(found, "__wrapped__"):
        setattr(module, FUNCTION, whole(found))
