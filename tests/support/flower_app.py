"""Writes a Flower app of a few lines."""

from __future__ import annotations

import inspect
from pathlib import Path

PYPROJECT = """[project]
name = "{name}"
version = "0.1.0"
description = "An app of the tests"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "test"

[tool.flwr.app.components]
serverapp = "{name}.{server}:app"
clientapp = "{name}.client:app"

[tool.flwr.app.config]
overrides = ""
"""


def write(folder: Path, name: str, **modules: str) -> Path:
    """Write an app with the package `name` of these modules into `folder`, and return the folder.

    The server is ``server``, else ``client``; both have an object ``app``.
    """
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, text in modules.items():
        (package / f"{module}.py").write_text(inspect.cleandoc(text) + "\n")
    server = "server" if "server" in modules else "client"
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, server=server))
    return folder
