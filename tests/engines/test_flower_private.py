"""Flower's private names: which ones, where, and that nothing of Flower's is replaced."""

from __future__ import annotations

import ast
import functools
import re
import subprocess

import pytest

from fedcross.core.paths import import_root
from fedcross.engines import flower_private

ROOT = import_root()
PRIVATE = re.compile(r"^flwr\.(proto|supercore|superlink|server\.superlink|supernode)\b")
ALLOWED = "engines/flower_private.py"


@functools.cache
def sources() -> dict[str, ast.AST]:
    """Return the tracked Python files of the source that name flwr as syntax trees."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    skipped = ("tests/", "benchmarks/", "docs/", "examples/")
    names = [name for name in listed.split() if not name.startswith(skipped) and (ROOT / name).exists()]
    texts = {name: (ROOT / name).read_text() for name in names}
    return {name: ast.parse(text) for name, text in texts.items() if "flwr" in text}


def imported(tree: ast.AST) -> list[str]:
    """Return the dotted names that a file imports, and strings that name a private module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"flwr[\w.]+", node.value):
            found.append(node.value)
    return found


def replaced(tree: ast.AST) -> list[str]:
    """Return the attributes of names imported from Flower to which a file assigns."""
    of_flower = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [one for one in node.names if (module or one.name).partition(".")[0] == "flwr"]
            of_flower |= {one.asname or one.name.partition(".")[0] for one in names}
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
        flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            flat += [ast.Attribute(node.args[0], "setattr")]
        for target in flat:
            base = target
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(target, ast.Attribute) and isinstance(base, ast.Name) and base.id in of_flower:
                found.append(ast.unparse(target))
    return found


def test_only_one_file_imports_private_parts_of_flower() -> None:
    users = {file for file, tree in sources().items() if any(PRIVATE.match(name) for name in imported(tree))}
    assert users - {"engines/middleware.py"} == {ALLOWED}  # the middleware names a protobuf message


def test_at_most_a_dozen_names() -> None:
    assert len(flower_private._MODULES) + len(["TaskIdentity"]) <= 12


def test_nothing_of_flower_is_replaced() -> None:
    found = {file: replaced(tree) for file, tree in sources().items()}
    # TaskIdentity has setters for this: Flower's own programs set it in each process.
    assert {name: one for name, one in found.items() if one} == {
        ALLOWED: [f"TaskIdentity.{one}_id" for one in ("run", "node", "task")]
    }


@pytest.mark.parametrize("name", sorted(flower_private._MODULES))
def test_every_name_exists(name: str) -> None:
    assert getattr(flower_private, name) is not None


@pytest.mark.parametrize(("version", "known"), [("1.42.3", True), ("1.43.0.dev20261026", True), ("9.9.9", False)])
def test_versions_that_were_tried(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr(flower_private, "installed", lambda: version)
    assert flower_private.tried() is known


def test_installed_version() -> None:
    assert flower_private.tried(), flower_private.installed()
