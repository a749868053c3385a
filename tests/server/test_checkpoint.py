"""Checkpoints: complete or not there, damaged ones passed over, old formats refused by name."""

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fedcross.core.errors import StorageError
from fedcross.server.checkpoint import DIGESTS, Checkpoints
from fedcross.strategies.round.packing import Packed as State

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
    assert saved(tmp_path / "a", *range(1, 9), keep=2, milestone=3).rounds() == [3, 6, 7, 8]
    assert saved(tmp_path / "b", *range(5), keep=1).rounds() == [4]


@pytest.mark.parametrize("kept", [0, 7, 100, -3])
def test_a_damaged_or_half_written_checkpoint_falls_back_to_the_one_before(tmp_path, kept):
    checkpoints = saved(tmp_path, 1, 2)
    data = checkpoints.path(2).read_bytes()
    checkpoints.path(2).write_bytes(data[:kept] if kept >= 0 else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(StorageError):
        checkpoints.load(2)
    assert checkpoints.latest()[0] == 1


def test_a_renamed_checkpoint_is_passed_over_and_pushes_out_no_good_one(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    shutil.copy(checkpoints.path(1), checkpoints.path(7))
    assert checkpoints.latest()[0] == 2
    checkpoints.save(3, STATE, {"run": "x"})
    assert checkpoints.rounds() == [2, 3, 7]
    shutil.copy(checkpoints.path(3), checkpoints.path(2))
    with pytest.raises(StorageError, match="round"):
        checkpoints.load(2)
    for name in ("round-x.safetensors", "round-1.safetensors", "notes.txt"):
        (checkpoints.folder / name).write_bytes(b"\xff")
    assert checkpoints.latest()[0] == 3


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "2"}, "written by fedcross"),
        ({"identity": "{}"}, "header's digest"),
        ({"round": "9"}, "header's digest"),
    ],
)
def test_a_header_that_was_changed_or_is_of_another_format_is_refused(tmp_path, header, message):
    checkpoints = saved(tmp_path, 1, 2)
    arrays = load_file(checkpoints.path(2))
    with safe_open(checkpoints.path(2), framework="numpy") as file:
        found = dict(file.metadata())
    save_file(arrays, checkpoints.path(2), metadata=found | header)
    with pytest.raises(StorageError, match=message):
        checkpoints.load(2)
    assert checkpoints.latest()[0] == 1
    assert checkpoints.identity() == {"run": "x", "round": 1}


def test_numbers_that_json_does_not_have_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, State({}, {"best": [float("inf"), float("-inf")], "x": 1.5}), {"run": "x"})
    assert checkpoints.load(1)[0].values == {"best": [float("inf"), float("-inf")], "x": 1.5}


def test_scalars_and_numbers_in_another_byte_order_come_back(tmp_path):
    state = State({"big": np.array([1, 258], ">i4"), "n": np.array(3), "m": np.eye(3)[:, ::2]})
    Checkpoints(tmp_path).save(1, state, {"run": "x"})
    arrays = Checkpoints(tmp_path).load(1)[0].arrays
    assert (arrays["big"].tolist(), arrays["big"].dtype) == ([1, 258], np.int32)
    assert (arrays["n"].shape, arrays["n"]) == ((), 3)
    assert (arrays["m"] == np.eye(3)[:, ::2]).all()


def test_arrays_that_no_file_holds_are_refused(tmp_path):
    with pytest.raises(StorageError, match="complex128"):
        Checkpoints(tmp_path).save(1, State({"x": np.zeros(2, np.complex128)}, {}), {})
    assert Checkpoints(tmp_path).rounds() == []


def test_a_crash_leaves_no_checkpoint_without_its_digest(tmp_path, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    checkpoints = saved(tmp_path, 1)
    monkeypatch.setattr("fedcross.server.checkpoint.write_atomically", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, STATE, {"run": "x"})
    assert checkpoints.rounds() == [1]
    assert [line["round"] for line in map(json.loads, (tmp_path / DIGESTS).read_text().splitlines())] == [1, 2]


def test_the_digest_of_a_round_covers_names_shapes_types_and_values(tmp_path):
    a = np.arange(6, dtype=np.int32)
    arrays = [{"w": a}, {"w": a.copy()}, {"v": a}, {"w": a.reshape(2, 3)}, {"w": a.view(np.float32)}, {"w": a[::-1]}]
    for number, found in enumerate(arrays):
        Checkpoints(tmp_path).save(number, State(found, {"n": 1}), {"run": str(number)})
    Checkpoints(tmp_path).save(6, State({"w": a}, {"n": 2}), {})
    told = [json.loads(line)["digest"] for line in (tmp_path / DIGESTS).read_text().splitlines()]
    assert told[0] == told[1]
    assert len(set(told)) == 6
