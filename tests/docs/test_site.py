"""What the docs site and the files of the repository promise, as far as it can be checked without MkDocs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from fedcross.server.commands.method_template import files

ROOT = Path(__file__).resolve().parents[2]
#: Files outside docs/ that are pages (docs/site_pages.py).
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "own-app.md": "examples/own_app/README.md",
    "classic-app.md": "examples/classic_app/README.md",
}
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def named(node):
    """Return the pages that a part of the site's table of contents names."""
    if isinstance(node, str):
        return [node]
    return [page for part in (node.values() if isinstance(node, dict) else node) for page in named(part)]


def test_every_page_stands_in_the_contents_once():
    pages = named(CONFIG["nav"])
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted(there | set(OUTSIDE))
    assert all((ROOT / source).is_file() for source in OUTSIDE.values())


def test_a_wrong_link_ends_the_build_and_nothing_is_fetched():
    assert CONFIG["strict"] is True
    assert set(CONFIG["validation"]["links"].values()) == {"warn"}
    assert CONFIG["validation"]["links"].keys() >= {"not_found", "anchors"}
    assert CONFIG["theme"]["font"] is False
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    # --quiet would hide the warnings from --strict too
    assert "mkdocs build --strict" in recipe
    assert "--quiet" not in shlex.split(recipe)


def test_links_between_files_of_the_checkout_lead_somewhere():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / source for source in OUTSIDE.values())]
    broken = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_twenty_places_are_named_and_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (Where .*\?|Which .*\?) \| `([\w/.]+)` \|$", text, re.MULTILINE)
    assert len(rows) == len({answer for _, answer in rows}) == 20
    if (ROOT / "core").is_dir():  # the table is that of the house below one import root
        assert [answer for _, answer in rows if not (ROOT / answer).is_file()] == []


def test_the_pages_name_the_files_that_new_method_writes():
    texts = [(ROOT / name).read_text().split("\n## Add a method\n")[1] for name in ("README.md", "CONTRIBUTING.md")]
    for path in files("NAME"):
        assert all(f"`{path}`" in text.split("\n## ")[0] for text in texts), path


def test_workflow_and_templates():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    assert "make docs" in [step.get("run") for step in jobs["docs"]["steps"]]
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or {"name", "description", "body"} <= form.keys()


def test_the_citation_names_the_three_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == version
    titles = " ".join(reference["title"] for reference in citation["references"])
    assert all(word in titles for word in ("Cross-Aggregation", "Feature Fusion", "Cross-Training"))
    assert f"## {version} - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_says_at_its_top_what_a_client_of_fedcross_learns_about_another():
    top = " ".join((ROOT / "README.md").read_text().split("\n## ")[0].split())
    assert "a client receives the model that another client has just trained" in top
    assert "(docs/deploy.md#what-a-client-learns-about-another)" in top
    section = (ROOT / "docs" / "deploy.md").read_text().split("\n## What a client learns about another\n")[1]
    assert {"What helps:", "What does not:"} <= set(re.findall(r"What [a-z ]+:", section.split("\n## ")[0]))
