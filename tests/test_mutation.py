"""Which tests the mutation runner takes for a file (`tests/support/mutation.py`)."""

from pathlib import Path

import pytest

from tests.support.mutation import own_tests


def test_a_file_without_tests_of_its_own_is_refused(tmp_path: Path):
    """Without a path pytest would run the whole suite for every mutant."""
    with pytest.raises(RuntimeError, match=r"strategies/alone\.py: no tests/strategies/test_alone\*\.py"):
        own_tests("strategies/alone.py", tmp_path)
