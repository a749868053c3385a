from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.deploy import sample
from tests.support.disk import largest_file


@pytest.mark.parametrize(("name", "says"), [("../../evil", "lower-case"), ("server", "and not")])
def test_a_device_whose_folder_would_be_anothers(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sample.write(tmp_path / "a" / "b", ["porch", name])
    assert not any(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing_that_would_stay(tmp_path: Path) -> None:
    with largest_file(300), pytest.raises(StorageError, match="cannot be written"):
        sample.write(tmp_path, ["porch"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    written = sample.write(tmp_path, ["porch"])
    assert [str(path.relative_to(tmp_path)) for path in written] == ["porch/data.npz", "server/data.npz"]
    assert np.load(written[0])["x"].shape[1:] == (1, 8, 8)
    assert (np.load(written[0])["x"].min(), np.load(written[0])["x"].max()) == (0, 1)
    assert (np.load(written[1])["x_test"].min(), np.load(written[1])["x_test"].max()) == (0, 1)
    assert np.load(written[1])["x_test"].shape[1:] == (1, 8, 8)
    assert {path.stat().st_mode & 0o777 for path in written} == {0o644}
    assert sample.write(tmp_path, ["porch"]) == []
