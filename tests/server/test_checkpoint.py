import numpy as np
import pytest

from fedcross.core.errors import StorageError
from fedcross.server.checkpoint import Checkpoints
from fedcross.strategies.round.federation import State

STATE = State({"pool": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, np.int64)}, {"last": [1, 2]})


def saved(folder, *rounds, **options):
    checkpoints = Checkpoints(folder, **options)
    for number in rounds:
        checkpoints.save(number, STATE, {"run": "x", "round": number})
    return checkpoints


def test_what_was_saved_comes_back(tmp_path):
    state, identity = saved(tmp_path, 4).load(4)
    assert all((state.arrays[n] == a).all() and state.arrays[n].dtype == a.dtype for n, a in STATE.arrays.items())
    assert state.values == {"last": [1, 2]}
    assert identity == {"run": "x", "round": 4}


def test_the_newest_stay_and_every_milestone(tmp_path):
    assert saved(tmp_path, *range(1, 8), keep=2, milestone=3).rounds() == [3, 6, 7]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    path = checkpoints.path(2)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StorageError, match="digest"):
        checkpoints.load(2)
    assert checkpoints.latest()[0] == 1


@pytest.mark.parametrize("kept", [0, 7, 100])
def test_a_half_written_checkpoint_is_passed_over(tmp_path, kept):
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.path(2).write_bytes(checkpoints.path(2).read_bytes()[:kept])
    assert checkpoints.latest()[0] == 1


def test_without_any_it_says_what_to_do(tmp_path):
    with pytest.raises(StorageError, match="without resume"):
        Checkpoints(tmp_path).latest()


def test_a_full_disk_keeps_the_rounds_before(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedcross.server.checkpoint.write_atomically", full)
    with pytest.raises(StorageError, match="The rounds before it are safe"):
        checkpoints.save(2, STATE, {})
    assert checkpoints.latest()[0] == 1
