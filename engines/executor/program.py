"""Starts the parts of this folder, which it imports under a private name; a script.

::

    python -P engines/executor/program.py supervisor --port 9094 --secret superexec.key -- flower-supernode ...
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

#: Name of this folder in the processes that it starts. There, no part of fedcross is imported before its bundle is.
PRIVATE = "_fedcross_executor"
PARTS = ("supervisor", "node", "worker", "serverapp")


def command(part: str) -> list[str]:
    """Return how to start `part`; its arguments follow."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), part]


def beside(name: str) -> str:
    """Return the path of one of Flower's commands; look beside this Python first, then on PATH."""
    found = Path(sys.executable).parent / name
    path = str(found) if found.is_file() else shutil.which(name)
    if path is None:
        raise SystemExit(f"{name}: not found beside {sys.executable} nor on PATH. Install flwr.")
    return path


def load(part: str) -> ModuleType:
    """Return the module `part` of this folder, imported under the private name."""
    if PRIVATE not in sys.modules:
        folder = Path(__file__).resolve().parent
        found = importlib.util.spec_from_file_location(
            PRIVATE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if found is None or found.loader is None:
            raise SystemExit(f"{folder}: this part of fedcross is missing. Install fedcross again.")
        package = importlib.util.module_from_spec(found)
        sys.modules[PRIVATE] = package
        found.loader.exec_module(package)
    return importlib.import_module(f"{PRIVATE}.{part}")


def main(arguments: list[str]) -> int:
    """Run the part that the first argument names and return its exit code."""
    part, *rest = arguments or [""]
    if part not in PARTS:
        raise SystemExit(f"{part or 'nothing'}: start one of {', '.join(PARTS)}.")
    run: Callable[[list[str]], int] = load(part).main
    return run(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
