"""The digests of a task's data: what they cover, and that they cost little memory."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedcross.tasks import data
from fedcross.tasks.base import Examples


def task(x: Any = None, users: Any = None, y: Any = (0, 1, 1)) -> Any:
    inputs = np.arange(12, dtype=np.float32).reshape(3, 4) if x is None else x
    whole = Examples(inputs, np.array(y), None if users is None else np.array(users))
    none = Examples(np.empty((0, 4), np.float32), np.empty(0, np.int64))
    return SimpleNamespace(train=whole, test=none)


def test_the_digest_is_that_of_types_shapes_and_bytes():
    """What a process lacks has none."""
    x, y = np.arange(12, dtype="<f4"), np.array([0, 1, 1], dtype="<i8")
    by_hand = hashlib.sha256(b"<f4 (3, 4)" + x.tobytes() + b"<i8 (3,)" + y.tobytes() + b"NoneType").hexdigest()
    assert data.digests(task()) == {"train": by_hand}


def test_every_array_counts_and_its_layout_does_not(monkeypatch: pytest.MonkeyPatch):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    changed = x.copy()
    changed[2, 3] += 1
    others = [task(changed), task(users=[0, 0, 1]), task(users=[0, 1, 1]), task(y=(0, 1, 0)), task(x.astype(float))]
    plain = data.digests(task())["train"]
    assert len({plain, *(data.digests(other)["train"] for other in others)}) == 6
    assert data.digests(task(np.asfortranarray(x)))["train"] == plain
    monkeypatch.setattr(data, "BLOCK", 16)
    assert data.digests(task())["train"] == plain


def test_of_a_large_array_blocks_count_that_are_spread_over_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "BLOCK", 16)
    monkeypatch.setattr(data, "MOST_BYTES", 32)
    seen = [bytes(block) for block in data._blocks(np.arange(12, dtype=np.float32).reshape(3, 4))]
    assert seen == [np.arange(4, dtype=np.float32).tobytes(), np.arange(8, 12, dtype=np.float32).tobytes()]


def test_inputs_that_are_no_array_count_by_their_type():
    class Lazy:
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("nothing is read for a digest")

    assert data.digests(task(Lazy())) != data.digests(task())
    assert set(data.digests(task(np.array(["a", 1, None], dtype=object)))) == {"train"}
