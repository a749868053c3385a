"""The pages: links, sizes, contents, and what they promise of files in the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normal

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BY_HAND = [path for path in sorted(DOCS.glob("*.md")) if path.name != "results.md"]
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/page.md")]
PAGES = [*BY_HAND, *OTHERS, *sorted((ROOT / "examples").glob("*/README.md"))]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_the_pages_have_their_sizes():
    words = {path.name: len(path.read_text().split()) for path in [*DOCS.glob("*.md"), *OTHERS]}
    assert words["README.md"] <= 800  # with tables and code
    assert words["CHANGELOG.md"] <= 1500
    cells = re.sub(r"[|]", " ", (DOCS / "results.md").read_text())
    assert len(cells.split()) <= 3500
    assert sum(words[path.name] for path in BY_HAND) + 3500 <= 28_000


def test_links_lead_somewhere_and_every_picture_is_shown():
    shown, broken = set(), []
    for page in [*PAGES, DOCS / "results.md"]:
        text = page.read_text()
        found = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^":]+)"', text)
        home = DOCS if page.parent.name == "results" else page.parent
        broken += [(page.name, link) for link in found if not (home / link).exists()]
        shown |= {(home / link).resolve() for link in found}
    assert broken == []
    assert {path for path in (DOCS / "images").iterdir() if path not in shown} == set()


def test_every_page_stands_in_the_contents_once():
    def named(node):
        return [node] if isinstance(node, str) else [p for part in node for p in named(part_of(part))]

    def part_of(part):
        return next(iter(part.values())) if isinstance(part, dict) else part

    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(named(CONFIG["nav"])) == sorted(there)
    assert CONFIG["theme"]["font"] is False  # nothing is fetched
    assert CONFIG["extra"]["polyfills"] == ["iframe-worker.js"]


def test_every_dependency_has_a_row():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    asked = {normal(Requirement(line).name) for lines in lists for line in lines} - {"fedcross"}
    table = (DOCS / "architecture.md").read_text().split("\n## Dependencies\n")[1]
    cells = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[1:]
    assert sorted(normal(name) for cell in cells for name in cell.split(", ")) == sorted(asked)


def test_files_that_the_architecture_names_exist():
    rows = re.findall(
        r"^\| `([\w/]+)/` \|.*\| ((?:`[\w./]+`(?:, )?)+) \|$", (DOCS / "architecture.md").read_text(), re.M
    )
    assert len(rows) > 12
    missing = [(room, name) for room, names in rows for name in re.findall(r"`([\w./]+)`", names)
               if not (ROOT / room / name).exists() and not (ROOT / name).exists()]  # fmt: skip
    assert missing == []


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {citation['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert len(citation["references"]) >= 3
