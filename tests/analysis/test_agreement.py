"""Folders with files of several runs, or without some of their lines, are named, left out and not recorded."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedcross.analysis.loading import load_run, load_runs
from fedcross.analysis.records import record
from fedcross.analysis.report import write_report
from fedcross.core.errors import DataError
from tests.support.fake import config, write_run


def result(folder: Path, **fields: object) -> None:
    """Change fields of ``result.json``."""
    file = folder / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def lines(folder: Path, change) -> None:
    """Change the lines of ``metrics.jsonl``."""
    file = folder / "metrics.jsonl"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


DAMAGED = {
    "the result of another method": (lambda bad: result(bad, method="fedprox"), "method 'fedprox', not 'fedavg'"),
    "the result of another seed": (lambda bad: result(bad, seed=2), "seed 2, not 1"),
    "the result of other data": (lambda bad: result(bad, task="mnist"), "task 'mnist', not 'cifar10'"),
    "a shorter result": (lambda bad: result(bad, rounds=2), "disagree: rounds 2 and 4. If .*fedcross resume=.*bad"),
    "a result without accuracy": (lambda bad: result(bad, final_accuracy=None), "final_accuracy null and 0.4"),
    "another best accuracy": (lambda bad: result(bad, best_accuracy=0.9), "best_accuracy 0.9 and 0.4"),
    "metrics of another run": (
        lambda bad: shutil.copy(bad.parent / "good" / "metrics.jsonl", bad),
        "final_accuracy 0.4 and 0.8",
    ),
    "a lost line": (lambda bad: lines(bad, lambda all_: [*all_[:2], *all_[3:]]), "metrics.jsonl lacks round 3"),
    "two lost lines": (lambda bad: lines(bad, lambda all_: all_[2:]), "metrics.jsonl lacks rounds 1, 2"),
    "lost last lines": (lambda bad: lines(bad, lambda all_: all_[:2]), "metrics.jsonl lacks rounds 3, 4"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_folder_of_several_runs_is_left_out(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "runs" / "good", [0.1, 0.2, 0.3, 0.8], config(seed=3, rounds=4))
    bad = write_run(tmp_path / "runs" / "bad", [0.1, 0.2, 0.3, 0.4], config(rounds=4))
    for folder in (tmp_path / "runs").iterdir():
        result(folder, task="cifar10")
    damage, told = DAMAGED[what]
    damage(bad)
    loaded = load_runs([tmp_path])
    assert [run.path.name for run in loaded.runs] == ["good"]
    with pytest.raises(DataError, match=f"left out .*bad: .*{told}"):
        record([bad], "n", tmp_path / "results")
    assert not (tmp_path / "results").exists()
    assert len(record([tmp_path / "runs"], "n", tmp_path / "results")) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said == loaded.notes[0].strip()
    assert said.startswith(f"left out {bad}: ")


@pytest.mark.slow
def test_a_report_shows_the_note(tmp_path: Path):
    write_run(tmp_path / "good", [0.1, 0.2])
    result(write_run(tmp_path / "bad", [0.1, 0.2]), final_accuracy=0.9)
    text = write_report([tmp_path], tmp_path / "report", html=False)
    assert f"left out {tmp_path / 'bad'}: result.json and metrics.jsonl disagree: final_accuracy 0.9 and 0.2" in text


def test_what_an_older_or_longer_run_leaves_is_no_fault(tmp_path: Path):
    """A version without these fields, six digits in a record, and a run that was made longer and is not at its end."""
    old = write_run(tmp_path / "old", [0.1, 1 / 3])
    (old / "result.json").write_text('{"method": "fedavg"}')
    assert load_run(old).finished
    short = write_run(tmp_path / "short", [0.1, 0.333333])
    result(short, final_accuracy=1 / 3, best_accuracy=1 / 3)
    assert load_run(short).finished
    longer = write_run(tmp_path / "longer", [0.1, 0.2, 0.3], config(rounds=9))
    result(longer, rounds=2, final_accuracy=0.2)
    assert load_run(longer).note == "unfinished, 3 of 9 rounds"
    assert load_run(longer, until=2).finished


def test_rounds_before_a_lost_line_can_be_compared_and_all_be_counted_as_they_are(tmp_path: Path):
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4])
    lines(folder, lambda all_: [*all_[:2], *all_[3:]])
    assert load_run(folder, until=2).finished
    assert load_run(folder, until=4).note == "metrics.jsonl lacks round 3"
    assert load_runs([folder], unfinished=True).notes == [f"counted as it is {folder}: metrics.jsonl lacks round 3"]
    lines(folder, lambda all_: all_[:2])
    assert load_run(folder, until=2).finished
    assert load_run(folder, until=3).note == "metrics.jsonl lacks round 3"
    assert load_run(folder).note == "metrics.jsonl lacks rounds 3, 4"


def test_digests_of_another_run_are_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The checkpoints that the folder still has tell; a round without a line, as of an older version, does not."""
    for name, digest in (("good", "a"), ("bad", "b")):
        folder = write_run(tmp_path / "runs" / name, [0.1, 0.2], config(seed=ord(digest), rounds=2))
        result(folder, task="cifar10")
        (folder / "digests.jsonl").write_text('{"round": 2, "digest": "b"}\n{"round": 2, "digest": "a"}\n')
        (folder / "checkpoints").mkdir()
        for number in (1, 2):
            file = folder / "checkpoints" / f"round-{number:06d}.safetensors"
            save_file({"x": np.zeros(1)}, file, {"round": str(number), "digest": digest})
    told = "digests.jsonl is of another run than checkpoints/round-000002.safetensors"
    with pytest.raises(DataError, match=f"no run that can be recorded.\n  left out .*bad: {told}"):
        record([tmp_path / "runs" / "bad"], "n", tmp_path / "results")
    (recorded,) = record([tmp_path / "runs"], "n", tmp_path / "results")
    assert "seed97" in recorded.name
    assert capsys.readouterr().err == f"left out {tmp_path / 'runs' / 'bad'}: {told}\n"
