"""Paths of the fedcross package on this machine: in a checkout, an installed wheel or Flower's copy of an app."""

from __future__ import annotations

from pathlib import Path

import fedcross

#: The subpackages of ``fedcross``.
ROOMS = ("analysis", "client", "conf", "core", "deploy", "engines", "server", "strategies", "tasks")
#: Those that a Flower app carries to other machines: what only the commands use stays at home.
APP_ROOMS = tuple(name for name in ROOMS if name not in ("analysis", "deploy"))


def import_root() -> Path:
    """Return the folder in which ``import fedcross`` finds the package: the checkout, or ``site-packages``."""
    return Path(fedcross.__file__).resolve().parent.parent


def page(name: str) -> str:
    """Return where a reader finds page `name` of the folder ``docs``: its path in a checkout; a wheel has no pages."""
    path = import_root() / "docs" / name
    return str(path) if path.exists() else f"docs/{name} in fedcross's source"


def room(name: str, root: Path | None = None) -> Path:
    """Return the folder of subpackage `name` below `root` (default: :func:`import_root`).

    In a checkout it lies beside the folder ``fedcross``, in a wheel inside it.
    """
    root = root or import_root()
    beside = root / name
    return beside if (beside / "__init__.py").is_file() else root / "fedcross" / name
