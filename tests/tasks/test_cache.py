"""The cache: decoded once, mapped read-only, keyed by files and settings, and never in the way."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from fedcross.tasks.reading import cache
from fedcross.tasks.reading.cache import Store, cached


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "source.bin"
    path.write_bytes(b"abc")
    return path


class Decoder:
    def __init__(self):
        self.calls = 0

    def __call__(self, store: Store) -> None:
        self.calls += 1
        store.put("x", np.arange(6, dtype=np.uint8).reshape(2, 3))
        store.new("y", (2,), np.int64)[:] = [4, 5]
        store.put("none", np.zeros((0, 3), np.float32))


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


def test_damaged_entry_is_replaced(source, tmp_path, caplog):
    decode = Decoder()
    cached("toy", [source], {}, decode)
    [file] = (tmp_path / "cache").glob("toy-*/x.npy")
    file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        arrays = cached("toy", [source], {}, decode)
    assert decode.calls == 2
    assert "damaged" in caplog.text
    assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_unwritable_folder_falls_back_to_memory_and_says_so(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        arrays = cached("toy", [source], {}, Decoder())
    assert "stay in memory" in caplog.text
    assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not arrays["x"].flags.writeable


def test_user_without_a_home_gets_memory(source, monkeypatch, caplog):
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    assert cached("toy", [source], {}, Decoder())["y"].tolist() == [4, 5]
    assert "set FEDCROSS_CACHE" in caplog.text


@pytest.mark.slow
def test_processes_share_the_pages(source):
    """Two processes read a mapped 16 MiB array; together they hold it once (PSS), not twice."""
    program = (
        "import re, sys\n"
        "import numpy as np\n"
        "array = np.load(sys.argv[1], mmap_mode='r')\n"
        "array.sum()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "own = open('/proc/self/smaps').read().split(sys.argv[1])[1]\n"
        "print(re.search(r'Pss: +([0-9]+) kB', own)[1], flush=True); sys.stdin.readline()\n"
    )
    size = 16 * 1024 * 1024
    [file] = [cached("toy", [source], {}, lambda store: store.put("x", np.ones(size, np.uint8)))["x"].filename]
    pipe = subprocess.PIPE
    readers = [
        subprocess.Popen([sys.executable, "-c", program, str(file)], stdin=pipe, stdout=pipe, text=True)
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    kib = []
    for reader in readers:  # both stay alive until both have been measured
        reader.stdin.write("\n")
        reader.stdin.flush()
        kib.append(int(reader.stdout.readline()))
    for reader in readers:
        reader.communicate("\n")
    assert sum(kib) == pytest.approx(size / 1024, rel=0.02)


def test_full_disk_half_way_falls_back_and_leaves_nothing(source, tmp_path, monkeypatch, caplog):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    decode = Decoder()
    arrays = cached("toy", [source], {}, decode)
    assert decode.calls == 2
    assert "No space left" in caplog.text
    assert arrays["y"].tolist() == [4, 5]
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_failing_decoder_leaves_nothing_behind(source, tmp_path):
    def decode(store: Store) -> None:
        store.put("x", np.ones(3))
        raise ValueError("bad source")

    with pytest.raises(ValueError, match="bad source"):
        cached("toy", [source], {}, decode)
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_folder_order(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("FEDCROSS_CACHE")
    assert cache.cache_folder() == tmp_path / "b" / "fedcross"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert cache.cache_folder() == tmp_path / "c" / ".cache" / "fedcross"
