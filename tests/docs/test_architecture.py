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
