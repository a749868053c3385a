"""Makes the folder from which ``flwr app publish`` uploads fedcross to Flower Hub.

::

    python -m fedcross.deploy.hub dist/fedcross        # in a checkout; then: flwr app publish dist/fedcross

Hub takes at most 1,000 files, and the checkout has more: tests and recorded results stay at home.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fedcross.core.errors import StorageError
from fedcross.core.paths import ROOMS, import_root

#: Files beside the packages.
FILES = ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "fedcross/__init__.py")
_SUFFIXES = frozenset({".py", ".yaml"})


def make(target: Path, root: Path | None = None) -> Path:
    """Copy the app from the checkout `root` into the new folder `target`, and return it.

    Raises
    ------
    StorageError
        If `root` is no checkout (an installed wheel, say), or `target` exists.
    """
    root = root or import_root()
    if target.exists():
        raise StorageError(f"{target}: exists already. Name a new folder.")
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        raise StorageError(f"{root}: this is no checkout of fedcross, {missing[0]} is missing.")
    for room in ROOMS:
        shutil.copytree(root / room, target / room, ignore=_unwanted)
    for name in FILES:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, target / name)
    return target


def _unwanted(folder: str, names: list[str]) -> set[str]:
    paths = {name: Path(folder) / name for name in names}
    kept = {name for name, path in paths.items() if path.is_dir() or path.suffix in _SUFFIXES}
    return {*names} - kept | {"__pycache__"} & {*names}


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
