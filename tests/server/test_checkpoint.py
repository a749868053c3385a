import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fedcross.core.errors import DataError, StorageError
from fedcross.server.checkpoint import DIGESTS, Checkpoints
from fedcross.server.model_file import write_model
from fedcross.server.snapshots import Snapshots
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
    with pytest.raises(StorageError, match=r"without resume=, in another folder\."):
        Checkpoints(tmp_path).latest()


def test_a_full_disk_keeps_the_rounds_before(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedcross.server.checkpoint.write_atomically", full)
    with pytest.raises(StorageError, match="The rounds before it are safe"):
        checkpoints.save(2, STATE, {})
    assert checkpoints.latest()[0] == 1


def rewritten(path, **header):
    """Write a checkpoint again with another header, as a newer or a careless program would."""
    arrays = load_file(path)
    with safe_open(path, framework="numpy") as file:
        found = dict(file.metadata())
    save_file(arrays, path, metadata=found | header)


def test_a_renamed_or_copied_checkpoint_is_passed_over(tmp_path, caplog):
    checkpoints = saved(tmp_path, 1, 2)
    shutil.copy(checkpoints.path(1), checkpoints.path(7))
    assert checkpoints.rounds() == [1, 2, 7]
    assert checkpoints.latest()[0] == 2
    with pytest.raises(StorageError, match="the name says round 7, the content round 1"):
        checkpoints.load(7)


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path):
    mine, other = saved(tmp_path / "mine", 1, 2), Checkpoints(tmp_path / "other")
    other.save(3, STATE, {"run": "y"})
    shutil.copy(other.path(3), mine.path(3))
    assert mine.latest()[0] == 2
    assert mine.identity() == {"run": "x", "round": 2}
    with pytest.raises(StorageError, match="a checkpoint of run y, but this is run x"):
        mine.load(3)


def test_without_a_record_the_checkpoints_say_whose_they_are_and_two_runs_are_refused(tmp_path):
    mine, other = saved(tmp_path / "mine", 1, 2), Checkpoints(tmp_path / "other")
    (mine.folder / "run.json").unlink()  # as version 0.1 left it
    assert mine.latest()[0] == 2
    other.save(3, STATE, {"run": "y"})
    shutil.copy(other.path(3), mine.path(3))
    with pytest.raises(StorageError, match="checkpoints of 2 runs"):
        mine.latest()


def test_names_that_are_no_checkpoints_are_ignored_with_a_word(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fedcross.server.checkpoint.log", lambda level, text, *more: told.append(text % more))
    checkpoints = saved(tmp_path, 1)
    for name in ("round-x.safetensors", "round-1.safetensors", "round-0000001.safetensors", "notes.txt"):
        (checkpoints.folder / name).write_bytes(b"\xff")
    assert checkpoints.rounds() == [1]
    assert checkpoints.latest()[0] == 1
    assert len([text for text in told if "not a checkpoint's name" in text]) == 4


def test_later_files_that_cannot_be_used_do_not_push_out_good_ones(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for number in (8, 9):
        shutil.copy(checkpoints.path(1), checkpoints.path(number))
    checkpoints.save(3, STATE, {"run": "x"})
    assert checkpoints.rounds() == [2, 3, 8, 9]
    assert checkpoints.latest()[0] == 3


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "3"}, "format 3, this version reads up to 2"),
        ({"format": "new"}, "cannot be read"),
        ({"identity": "{}"}, "header's digest"),
        ({"round": "9"}, "header's digest"),
    ],
)
def test_a_header_that_was_changed_or_is_newer_is_refused(tmp_path, header, message):
    checkpoints = saved(tmp_path, 1, 2)
    rewritten(checkpoints.path(2), **header)
    with pytest.raises(StorageError, match=message):
        checkpoints.load(2)
    assert checkpoints.latest()[0] == 1
    assert checkpoints.identity() == {"run": "x", "round": 1}


def test_numbers_that_json_does_not_have_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, State({}, {"best": [float("inf"), float("-inf")], "x": 1.5}), {"run": "x"})
    assert checkpoints.load(1)[0].values == {"best": [float("inf"), float("-inf")], "x": 1.5}
    with safe_open(checkpoints.path(1), framework="numpy") as file:
        json.loads(file.metadata()["values"], parse_constant=lambda name: pytest.fail(name))


def test_only_the_owner_can_read_them(tmp_path):
    checkpoints = saved(tmp_path, 1)
    assert checkpoints.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in checkpoints.folder.iterdir()} == {0o600}


def test_a_crash_leaves_no_checkpoint_without_its_digest(tmp_path, monkeypatch):
    """The round is run again, and of two lines the last counts."""

    def crash(*_):
        raise KeyboardInterrupt

    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr("fedcross.server.checkpoint.write_atomically", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, STATE, {"run": "x"})
    assert checkpoints.rounds() == [1]
    assert [line["round"] for line in map(json.loads, (tmp_path / DIGESTS).read_text().splitlines())] == [1, 2]


def test_a_digests_line_that_was_cut_off_spoils_no_other(tmp_path):
    from fedcross.server.verify import _lines

    checkpoints = Checkpoints(tmp_path)
    for number in (1, 2):
        checkpoints.save(number, STATE, {"run": "a"})
    file = tmp_path / DIGESTS
    file.write_bytes(file.read_bytes()[:-30])
    checkpoints.save(3, STATE, {"run": "a"})
    assert [line["round"] for line in _lines(file, whole=False)] == [1, 3]
    with pytest.raises(DataError, match="not lines of JSON"):
        _lines(file)


def test_scalars_and_numbers_in_another_order_of_bytes_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(
        1, State({"big": np.array([1, 258], ">i4"), "n": np.array(3), "m": np.eye(3)[:, ::2]}), {"run": "x"}
    )
    arrays = checkpoints.load(1)[0].arrays
    assert (arrays["big"].tolist(), arrays["big"].dtype) == ([1, 258], np.int32)
    assert (arrays["n"].shape, arrays["n"]) == ((), 3)
    assert (arrays["m"] == np.eye(3)[:, ::2]).all()


def test_the_digest_of_a_scalar_is_that_of_earlier_versions(tmp_path):
    """They stored it as a list of one."""
    for number, value in enumerate((np.array(3), np.array([3]))):
        Checkpoints(tmp_path).save(number, State({"n": value}), {"run": "x"})
    assert len({json.loads(line)["digest"] for line in (tmp_path / DIGESTS).read_text().splitlines()}) == 1


def test_files_of_models_have_scalars(tmp_path):
    write_model(tmp_path / "model.safetensors", {"n": np.array(3)})
    Snapshots(tmp_path, [1]).model(1, {"n": np.array(3)})
    for name in ("model", "snapshots/round-000001"):
        assert load_file(tmp_path / f"{name}.safetensors")["n"].shape == ()


def test_more_numbers_than_a_header_holds_are_told_and_leave_no_digest(tmp_path):
    checkpoints = saved(tmp_path, 1)
    before = (tmp_path / DIGESTS).read_text()
    with pytest.raises(StorageError, match=r"round-000002.*keep them in arrays\. The rounds before it are safe"):
        checkpoints.save(2, State(STATE.arrays, {"kept": "1" * 100_000_001}), {"run": "x"})
    assert (tmp_path / DIGESTS).read_text() == before
    assert checkpoints.latest()[0] == 1
