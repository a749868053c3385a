"""The cache: decoded once, mapped read-only, keyed by files and settings, and never in the way."""

import logging
import os

import numpy as np
import pytest

from fedcross.tasks.reading.cache import cached


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "source.bin"
    path.write_bytes(b"abc")
    return path


class Decoder:
    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        np.save(folder / "y.npy", np.array([4, 5]))
        return {"x": np.arange(6, dtype=np.uint8).reshape(2, 3), "none": np.zeros((0, 3), np.float32)}


def test_second_call_maps_what_the_first_decoded(source):
    decode = Decoder()
    for _ in range(2):
        arrays = cached("toy", [source], {"size": 1}, decode)
    assert decode.calls == 1
    assert isinstance(arrays["x"], np.memmap)
    assert not arrays["x"].flags.writeable
    assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["y"].tolist() == [4, 5]
    assert arrays["none"].shape == (0, 3)


def test_changed_file_or_setting_is_decoded_again(source):
    decode = Decoder()
    cached("toy", [source], {"size": 1}, decode)
    cached("toy", [source], {"size": 2}, decode)
    assert decode.calls == 2
    source.write_bytes(b"abcd")
    cached("toy", [source], {"size": 1}, decode)
    assert decode.calls == 3
    os.utime(source, ns=(1, 1))
    cached("toy", [source], {"size": 1}, decode)
    assert decode.calls == 4


def test_unwritable_folder_falls_back_to_memory_and_says_so(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        arrays = cached("toy", [source], {}, Decoder())
    assert "stay in memory" in caplog.text
    assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not arrays["x"].flags.writeable


def test_failing_decoder_leaves_nothing_behind(source, tmp_path):
    def decode(folder):
        np.save(folder / "x.npy", np.ones(3))
        raise ValueError("bad source")

    with pytest.raises(ValueError, match="bad source"):
        cached("toy", [source], {}, decode)
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []
