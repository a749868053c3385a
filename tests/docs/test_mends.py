"""docs/mends.md names files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[list[str]]:
    """Return the cells of the page's rows, without heads."""
    lines = (ROOT / "docs" / "mends.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "claim"]


def test_every_row_names_a_mend_and_a_test_that_exist():
    found, missing = rows(), []
    for claim, mend, tests, without in found:
        assert claim
        assert without
        missing += [path for path in re.findall(r"`([^`]*/[^`]*)`", mend) if not (ROOT / path).exists()]
        named = re.findall(r"`(tests/\S+\.py)(?: -k ([^`]+))?`", tests)
        assert named or tests == "the same"
        for file, words in named:
            names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
            wanted = words.strip('"').split(" or ") if words else [""]
            missing += [f"{file} -k {word}" for word in wanted if not any(word in name for name in names)]
    assert missing == []
    assert len(found) > 70
