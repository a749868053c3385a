"""Reading run folders and the numbers of one run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.runs import load_run, load_runs, settled, smoothed
from tasks.errors import DataError
from tests.analysis.fake import config, write_run


def test_smoothed_by_hand():
    # Windows of 2 over .1 .5 .7 .2: means .3 .6 .45. The second is the largest; its values .5 and .7 lie .1 from .6.
    found = smoothed(np.array([0.1, 0.5, 0.7, 0.2]), window=2)
    assert found.mean == pytest.approx(0.6)
    assert found.std == pytest.approx(0.1)
    assert found.window == 2


def test_smoothed_of_a_short_curve_is_one_window():
    found = smoothed(np.array([0.2, 0.4]))
    assert (found.mean, found.std, found.window) == (pytest.approx(0.3), pytest.approx(0.1), 2)
    assert math.isnan(smoothed(np.array([])).mean)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_smoothed_lies_between_the_mean_of_the_last_window_and_the_best(values: list[float]):
    found = smoothed(np.array(values))
    assert np.mean(values[-10:]) - 1e-12 <= found.mean <= max(values) + 1e-12


@pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")  # raised while Flower is imported
def test_smoothed_is_what_the_server_writes():
    from server import accounting

    for length in (1, 9, 10, 11, 40):
        values = np.random.default_rng(length).random(length)
        mine = smoothed(values)
        assert {"mean": mine.mean, "std": mine.std, "window": mine.window} == accounting.smoothed(values.tolist())


def test_one_run(tmp_path: Path):
    # Evaluated every second round; 1.5 MB and 2 s per round; 5 local epochs.
    run = load_run(write_run(tmp_path / "run", [None, 0.4, None, 0.6, None, 0.5]))
    assert run.finished
    assert (run.final, run.best) == (0.5, 0.6)
    assert run.axis("rounds").tolist() == [1, 2, 3, 4, 5, 6]
    assert run.axis("bytes").tolist() == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    assert run.axis("seconds").tolist() == [2, 4, 6, 8, 10, 12]
    assert run.axis("epochs").tolist() == [5, 10, 15, 20, 25, 30]
    assert run.axis("exchanges").tolist() == [1, 2, 3, 4, 5, 6]
    assert (run.bytes_total, run.seconds_total) == (9e6, 12)
    assert run.reach(0.45, "rounds") == 4
    assert run.reach(0.4, "seconds") == 4
    assert math.isnan(run.reach(0.7, "bytes"))
    assert np.isnan(run.column("nonsense")).all()


def test_exchanges_are_summed_where_the_method_counts_them(tmp_path: Path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    lines = [json.loads(line) | {"exchanges": 3} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert load_run(folder).axis("exchanges").tolist() == [3, 6]
    for entry in lines:
        del entry["exchanges"]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert load_run(folder).axis("exchanges").tolist() == [1, 2]


def test_a_resumed_run_counts_repeated_rounds_once(tmp_path: Path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    again = json.loads(lines[1]) | {"test_accuracy": 0.25}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:2], json.dumps(again), lines[2]]) + "\n")
    assert load_run(folder).accuracy.tolist() == [0.1, 0.25, 0.3]


def test_interpolations_are_resolved_or_left_as_they_are(tmp_path: Path):
    folder = write_run(tmp_path / "run", [0.1], config(rounds="${train.epochs}"))
    assert load_run(folder).settings["rounds"] == 5
    folder = write_run(tmp_path / "other", [0.1], config(output="${hydra:runtime.output_dir}"))
    assert load_run(folder).settings["method.name"] == "fedavg"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("metrics.jsonl", None, "no metrics.jsonl"),
        ("metrics.jsonl", "", "no complete round"),
        ("metrics.jsonl", '{"round": 1}\nnonsense\n{"round": 2}\n', "damaged in line 2"),
        ("metrics.jsonl", '[1]\n{"round": 2}\n', "damaged in line 1"),
        ("metrics.jsonl", '{"round": 1, "test_accuracy": null}\n', "no round was evaluated"),
        ("metrics.jsonl", b"\xff\xfe\x00", "cannot be read"),
        (".hydra/config.yaml", None, "no .hydra/config.yaml"),
        (".hydra/config.yaml", "a: [1", "cannot be read"),
        (".hydra/config.yaml", "seed: 1\n", "no method.name"),
        (".hydra/config.yaml", "- 1\n", "no method.name"),
        ("result.json", None, "unfinished, 2 of 2 rounds"),
        ("result.json", "{", "result.json is damaged"),
    ],
)
def test_damaged_folders_are_named_with_the_reason(tmp_path: Path, file: str, text: str | bytes | None, reason: str):
    write_run(tmp_path / "good", [0.1, 0.2])
    bad = write_run(tmp_path / "bad", [0.1, 0.2], config(rounds=2))
    if text is None:
        (bad / file).unlink()
    else:
        (bad / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    loaded = load_runs([tmp_path])
    assert [run.path.name for run in loaded.runs] == ["good"]
    assert len(loaded.notes) == 1
    assert str(bad) in loaded.notes[0]
    assert reason in loaded.notes[0]


def test_a_cut_off_last_line_is_an_unfinished_run(tmp_path: Path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3], config(rounds=9), finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "test_acc')
    (run,) = load_runs([tmp_path], unfinished=True).runs
    assert run.note == "unfinished, 3 of 9 rounds, line 4 of metrics.jsonl is cut off"
    with pytest.raises(DataError, match="3 of 9 rounds"):
        load_runs([tmp_path])


def test_several_folders_are_searched_and_each_run_is_found_once(tmp_path: Path):
    write_run(tmp_path / "a" / "b" / "1", [0.1])
    write_run(tmp_path / "a" / "2", [0.1])
    assert len(load_runs([tmp_path, tmp_path / "a" / "b"]).runs) == 2


def test_a_setting_that_came_later_and_is_off_does_not_tell_runs_apart():
    old = {"method.name": "scaffold", "train.lr": 0.05}
    new = old | {"train.clip": None, "defence.enabled": False, "defence.clip": 1, "attack.name": "none"}
    assert settled(dict(old)) == settled(dict(new))
    assert settled(dict(new | {"train.clip": 10}))["train.clip"] == 10
    assert settled(dict(new | {"defence.enabled": True}))["defence.clip"] == 1
