"""The digests of a task's data: what they cover, and that they cost little memory."""

from __future__ import annotations

import hashlib
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcross.core.errors import ConfigError, DataError
from fedcross.core.settings import Settings
from fedcross.tasks import data
from fedcross.tasks.base import Examples, Partition, Task
from fedcross.tasks.data import FederatedData, held_out
from fedcross.tasks.reading.params import limited, stratified
from fedcross.tasks.scoring import scores


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


def test_a_validation_part_is_held_out_of_every_class_before_the_partition():
    y = np.array([0] * 10 + [1] * 20)
    whole = Task("t", Examples(np.arange(30), y), Examples(np.arange(3), y[:3]), 2, (1,), torch.from_numpy)
    assert held_out(whole, 0.0) is whole
    held = held_out(whole, 0.1)
    assert np.bincount(held.validation.y).tolist() == [1, 2]
    assert sorted([*held.train.x, *held.validation.x]) == list(range(30))
    assert held_out(whole, 0.1).validation.x.tolist() == held.validation.x.tolist()
    with pytest.raises(ConfigError, match="validation"):
        held_out(whole, 0.01)


def test_a_client_is_scored_on_its_own_view_of_its_test_inputs():
    y = np.array([0, 1, 0])
    whole = Task("t", Examples(np.arange(3), y), Examples(np.arange(3), y), 2, (1,), torch.from_numpy)
    parts = Partition([y, y], [np.array([0]), np.array([1, 2])], transform=lambda client, raw: raw + 10 * client)
    inputs, labels = FederatedData(whole, parts).client_test(1, torch.device("cpu"))
    assert (inputs.tolist(), labels.tolist()) == ([11, 12], [1, 0])


def test_a_client_that_does_not_exist_or_has_nothing_is_refused_and_a_device_has_one_part():
    y, cpu = np.array([0, 1, 0]), torch.device("cpu")
    whole = Task("t", Examples(np.arange(3), y), Examples(np.arange(3), y), 2, (1,), torch.from_numpy)
    several = FederatedData(whole, Partition([np.array([2, 0]), y[:0]]))
    assert [found.tolist() for found in several.client(0, cpu)] == [[2, 0], [0, 0]]
    for client, told in ((-1, "clients 0 to 1"), (2, "clients 0 to 1"), (1, "no training examples")):
        with pytest.raises(DataError, match=told):
            several.client(client, cpu)
    device = FederatedData(whole, Partition([np.array([1])], own=True))
    assert device.client(7, cpu)[0].tolist() == [1]


def test_what_is_held_out_is_rounded_by_class_and_leaves_one_and_a_limit_keeps_the_order():
    """A tenth of 4, 5 and 15 is .4, .5 and 1.5: none, one, two. Of two examples one stays, whatever is asked."""
    y = np.repeat([0, 1, 2], [4, 5, 15])
    kept, held = stratified(y, 0.1, "x")
    assert (np.bincount(y[held], minlength=3).tolist(), len(kept)) == ([0, 1, 2], 21)
    assert [len(part) for part in stratified(np.zeros(2, np.int64), 0.99, "x")] == [1, 1]
    some = limited(Examples(np.arange(100), np.arange(100)), 10, "train").x.tolist()
    assert (len(some), sorted(some), some[9] > 50) == (10, some, True)  # from everywhere, not the first ones


def test_data_is_loaded_once_but_split_anew_for_another_seed():
    read: list[Settings] = []
    task = ModuleType("digits_of_mine")
    task.load = lambda settings: read.append(settings) or "task"  # type: ignore[attr-defined]
    parts = ModuleType("parts_of_mine")
    parts.split = lambda settings, loaded, seed: (loaded, seed)  # type: ignore[attr-defined]
    found = [data.load(task, Settings(), parts, Settings(), seed).partition for seed in (1, 1, 2)]
    data.forget()
    assert found == [("task", 1), ("task", 1), ("task", 2)]
    assert len(read) == 2


def test_scores_by_hand():
    """Class 0: two of three right; class 1: one of one. Chances of class 1 rank the only positive second of four."""
    logits = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
    found = scores(logits, torch.tensor([0, 0, 0, 1]))
    expected = {
        "majority_share": 0.75,
        "balanced_accuracy": 5 / 6,
        "sensitivity": 1.0,
        "specificity": 2 / 3,
        "auc": 2 / 3,
    }
    assert found == pytest.approx(expected)
    absent = scores(torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 0]))
    assert absent["balanced_accuracy"] == pytest.approx(0.75)
    assert "sensitivity" not in absent
