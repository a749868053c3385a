"""The operator's token comes from a file that only its owner reads."""

import pytest

from fedcross.core.errors import StorageError
from fedcross.engines.operator_token import SHORTEST, VARIABLE, read


def test_a_token_that_others_can_read_is_refused(tmp_path):
    (path := tmp_path / "operator.token").write_text("x" * SHORTEST + "\n")
    path.chmod(0o600)
    assert read({VARIABLE: str(path)}) == "x" * SHORTEST
    assert read({}) == ""
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(StorageError, match="read"):
            read({VARIABLE: str(path)})
