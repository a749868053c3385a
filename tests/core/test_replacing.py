"""When a file that holds a secret counts as written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedcross.core.replacing import replacing


def test_the_new_name_is_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done, fsync = tmp_path / "key", [], os.fsync

    def flushed(descriptor: int) -> None:
        done.append(("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file", path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    with replacing(path) as file:
        file.write(b"secret")
    assert done == [("file", False), ("folder", True)]


def test_a_folder_that_cannot_be_flushed_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refused(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, os.strerror(22))  # some file systems of a network
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    with replacing(tmp_path / "key") as file:
        file.write(b"secret")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("key", b"secret")]
