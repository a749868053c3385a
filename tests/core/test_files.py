import json
import math
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.core.files import dumps, dumps_exact, loads_exact, open_lines, replacing

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(VALUES)
def test_every_value_comes_back_and_the_text_is_json(value):
    text = dumps_exact(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    json.loads(dumps(value), parse_constant=lambda name: pytest.fail(name))
    assert loads_exact(text) == value


def test_what_is_not_finite():
    assert dumps({"a": [math.inf, math.nan, 1.0]}) == '{"a": [null, null, 1.0]}'
    assert math.isnan(loads_exact(dumps_exact([math.nan]))[0])


def test_a_file_is_replaced_once_it_is_on_the_disk_or_not_at_all(tmp_path, monkeypatch):
    path, flushed, fsync = tmp_path / "key", [], os.fsync

    def noted(descriptor):
        flushed.append(("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file", path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(path) as file:
        file.write(b"secret")
    assert flushed == [("file", False), ("folder", True)]
    assert path.stat().st_mode & 0o777 == 0o600
    with replacing(tmp_path / "certificate", 0o644) as file:
        file.write(b"public")
    assert (tmp_path / "certificate").stat().st_mode & 0o777 == 0o644
    (tmp_path / "certificate").unlink()
    with pytest.raises(OSError, match="full"), replacing(path) as file:
        file.write(b"new")
        raise OSError("full")
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"secret"]


def test_a_line_that_a_crash_cut_off_is_ended(tmp_path):
    (tmp_path / "log").write_text('{"a": 1}\n{"b"')
    with open_lines(tmp_path / "log") as lines:
        lines.write("next\n")
    assert (tmp_path / "log").read_text() == '{"a": 1}\n{"b"\nnext\n'


def test_a_symbolic_link_is_not_written_through(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "lines").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        open_lines(tmp_path / "lines")
    assert (tmp_path / "other").read_text() == "kept"
