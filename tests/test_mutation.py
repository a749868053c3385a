"""Which tests the mutation runner takes for a file (`tests/support/mutation.py`)."""

import re
from pathlib import Path

import pytest

from tests.support.mutation import MORE, ROOT, own_tests

PAGE = ROOT / "docs" / "mutation.md"


def test_every_file_on_the_page_has_tests_and_every_test_of_the_list_is_there():
    files = re.findall(r"^\| `([\w/]+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(files) > 30
    assert all(own_tests(file) for file in files)
    listed = [test for tests in MORE.values() for test in tests]
    assert [test for test in listed if not (ROOT / test).is_file()] == []


def test_a_file_without_tests_of_its_own_is_refused(tmp_path: Path):
    """Without a path pytest would run the whole suite for every mutant."""
    with pytest.raises(RuntimeError, match=r"strategies/alone\.py: no tests/strategies/test_alone\*\.py"):
        own_tests("strategies/alone.py", tmp_path)
