"""The table of docs/architecture.md says why each dependency is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fedcross.deploy.requirements import normal, roots

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_has_a_row():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = roots(project, project["project"]["optional-dependencies"]) - {"fedcross"}
    table = (ROOT / "docs" / "architecture.md").read_text().split("\n## Dependencies\n")[1]
    cells = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[1:]
    named = [normal(name) for cell in cells for name in re.sub(r" \(.*\)", "", cell).split(", ")]
    assert sorted(named) == sorted(asked)


def test_no_module_is_imported_by_a_name_that_only_a_checkout_has():
    """In a wheel a room is found below ``fedcross`` alone; in a checkout it lies beside it too."""
    rooms = "|".join(
        sorted(
            path.parent.name
            for path in ROOT.glob("*/__init__.py")
            if path.parent.name not in ("benchmarks", "docs", "fedcross", "tests")
        )
    )
    bare = re.compile(rf"""^\s*(?:from|import) (?:{rooms})[. ]|import_module\(f?["'](?:{rooms})\.""", re.MULTILINE)
    assert rooms.count("|") > 5
    assert bare.search('x = importlib.import_module(f"analysis.{kind}")')
    sources = [path for room in rooms.split("|") for path in (ROOT / room).rglob("*.py")]
    assert [str(path) for path in sources if bare.search(path.read_text())] == []
