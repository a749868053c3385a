import numpy as np
import pytest

from client.state import StateStore
from tasks.errors import StorageError


def test_the_accepted_visit_is_continued_not_the_last(tmp_path):
    store = StateStore(tmp_path, "run", 3)
    store.save(1, {"c": np.float32([1])}, keep=0)
    store.save(2, {"c": np.float32([2])}, keep=1)  # this upload gets lost
    assert StateStore(tmp_path, "run", 3).load(1)["c"] == 1
    store.save(3, {"c": np.float32([3])}, keep=1)
    assert store.load(3)["c"] == 3


def test_old_states_are_forgotten_and_the_accepted_one_stays(tmp_path):
    store = StateStore(tmp_path, "run", 0)
    for visit in (1, 2, 3):
        store.save(visit, {"c": np.float32([visit])}, keep=visit - 1)
    assert sorted(path.stem for path in store.folder.glob("*.npz")) == ["2", "3"]


def test_a_new_or_replaced_device_starts_empty(tmp_path):
    store = StateStore(tmp_path, "run", 0)
    assert store.load(0) == {}
    assert store.load(9) == {}


def test_runs_and_clients_do_not_meet(tmp_path):
    StateStore(tmp_path, "a", 0).save(1, {"c": np.zeros(1)}, 0)
    assert StateStore(tmp_path, "b", 0).load(1) == {}
    assert StateStore(tmp_path, "a", 1).load(1) == {}


def test_an_unwritable_place_is_an_error_that_says_so(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="Free disk space"):
        StateStore(blocked, "run", 0).save(1, {"c": np.zeros(1)}, 0)
