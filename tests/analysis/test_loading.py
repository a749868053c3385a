"""Reading run folders: what is damaged is named, what is there is read whole."""

import json
from pathlib import Path

import pytest

from fedcross.analysis.loading import load_run, load_runs, settled
from fedcross.core.errors import DataError
from tests.support.fake import config, write_run


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


def test_where_no_run_is_finished_the_way_to_finish_one_is_told(tmp_path: Path):
    """A run that was stopped, one that lacks its result alone, and those that cannot be continued."""

    def told(folder: Path) -> str:
        with pytest.raises(DataError) as error:
            load_runs([folder])
        return str(error.value)

    counted = "fedcross report --unfinished counts all as they are."
    for name, rounds, note in (("stopped", 9, "3 of 9 rounds"), ("ended", 3, "3 of 3 rounds but no result.json")):
        folder = write_run(tmp_path / name, [0.1, 0.2, 0.3], config(rounds=rounds), finished=False)
        assert told(folder) == f"{folder}: no finished run. {counted}\n  left out {folder}: unfinished, {note}"
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "round-000003.safetensors").touch()
        assert f"no finished run. To finish one: fedcross resume={folder}, with rounds=N to end it at" in told(folder)
        assert counted in told(folder)
    gap = write_run(tmp_path / "gap", [0.1, 0.2, 0.3])
    lines = (gap / "metrics.jsonl").read_text().splitlines(keepends=True)
    (gap / "metrics.jsonl").write_text(lines[0] + lines[2])
    (tmp_path / "ended" / "checkpoints").rename(gap / "checkpoints")
    assert f"{gap}: no finished run. {counted}\n" in told(gap)
    (gap / "result.json").write_text('{"seed": 9}')
    assert "no finished run. Give a folder that `fedcross` has written to.\n" in told(gap)


def test_several_folders_are_searched_and_each_run_is_found_once(tmp_path: Path):
    write_run(tmp_path / "a" / "b" / "1", [0.1])
    write_run(tmp_path / "a" / "2", [0.1])
    assert len(load_runs([tmp_path, tmp_path / "a" / "b"]).runs) == 2


def test_files_beside_runs_are_passed_over(tmp_path: Path):
    write_run(tmp_path / "0", [0.1])
    (tmp_path / "multirun.yaml").write_text("")
    assert len(load_runs(list(tmp_path.iterdir())).runs) == 1
    with pytest.raises(DataError, match="no such folder"):
        load_runs([tmp_path / "multirun.yaml"])


def test_a_setting_that_came_later_and_is_off_does_not_tell_runs_apart():
    old = {"method.name": "scaffold", "train.lr": 0.05}
    new = old | {"train.clip": None, "defence.enabled": False, "defence.clip": 1, "attack.name": "none"}
    assert settled(dict(old)) == settled(dict(new))
    assert settled(dict(new | {"train.clip": 10}))["train.clip"] == 10
    assert settled(dict(new | {"defence.enabled": True}))["defence.clip"] == 1


def test_up_to_a_round_a_run_that_got_so_far_is_finished(tmp_path: Path):
    write_run(tmp_path / "long", [0.1, 0.2, 0.3], config(rounds=9), finished=False)
    write_run(tmp_path / "short", [0.4], config(rounds=1))
    write_run(tmp_path / "late", [None, None, 0.5], config(rounds=3))
    loaded = load_runs([tmp_path], until=2)
    assert {run.path.name: run.final for run in loaded.runs} == {"long": 0.2, "short": 0.4}
    assert loaded.notes == [f"left out {tmp_path / 'late'}: no evaluation up to round 2"]
    assert [run.path.name for run in load_runs([tmp_path], until=4).runs] == ["late", "short"]


def test_a_setting_that_came_later_is_no_difference_while_it_has_the_old_value():
    """A record of version 0.1 and one of today; another value counts, and the weighting only with propellers."""
    old = {"method.name": "fedcross", "method.mode": "cross", "method.propeller_weighting": "alpha"}
    new = old | {"method.propeller_weighting": "equal", "method.widths": (), "method.whole": 0, "train.only": ()}
    new |= {"partition.sampler": "keyed"}
    assert settled(dict(old)) == settled(dict(new))
    assert settled(new | {"partition.sampler": "authors"}) != settled(old)
    mixed = [settled(one | {"method.mode": "propellers"}) for one in (old, new)]
    assert mixed[0] != mixed[1]
