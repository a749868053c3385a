"""A process that stays warm between runs reads a device's own data again for each run, and only then."""

import numpy as np
import pytest

from fedcross.client import cache as work
from fedcross.client.cache import run_cache


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(work, "_read_for", [])


def write(folder, examples):
    y = np.arange(examples) % 2
    np.savez(
        folder / "data.npz",
        x=np.zeros((examples, 4, 4), np.uint8),
        y=y,
        x_test=np.zeros((2, 4, 4), np.uint8),
        y_test=y[:2],
    )


@pytest.mark.parametrize(
    ("partition", "fresh"), [("partition=local", True), ("partition=iid partition.clients=2", False)]
)
def test_own_data_that_changed_is_seen_by_the_next_run(tmp_path, partition, fresh):
    overrides = f"task=arrays task.root={tmp_path} task.classes=2 model=mlp clients_per_round=1 logger=none {partition}"
    write(tmp_path, 6)
    shop = run_cache(overrides, "first")
    assert len(shop.data.task.train.y) == 6
    write(tmp_path, 8)
    assert run_cache(overrides, "first") is shop
    later = run_cache(overrides, "second")
    assert (later is not shop) == fresh
    assert len(later.data.task.train.y) == (8 if fresh else 6)
    assert run_cache(overrides, "second") is later


def test_also_by_a_next_run_with_other_settings(tmp_path):
    """The data's own settings are the same, so a process that is not told reads nothing again."""
    common = (
        f"task=arrays task.root={tmp_path} task.classes=2 model=mlp clients_per_round=1 logger=none partition=local"
    )
    write(tmp_path, 6)
    assert len(run_cache(common, "first").data.task.train.y) == 6
    write(tmp_path, 8)
    other = f"{common} rounds=7"
    run_cache(other)  # the server's question, before the first visit
    shop = run_cache(other, "second")
    assert len(shop.data.task.train.y) == 8
    assert run_cache(other, "second") is shop
