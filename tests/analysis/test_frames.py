"""Runs become frames: cumulative columns, smoothed accuracy, and notes on folders that cannot be used."""

import json

import pytest

from fedcross.analysis.records import cumulative, load_runs, read_folder
from fedcross.core.errors import DataError
from tests.support.fake import config, write_run


def test_columns_are_cumulative_and_epochs_count_local_passes():
    lines = [
        {"round": 1, "bytes_down": 2, "bytes_up": 1, "seconds": 1.5, "exchanges": 2, "clients": 3},
        {
            "round": 2,
            "bytes_down": 2,
            "bytes_up": None,
            "seconds": 0.5,
            "exchanges": 0,
            "clients": 0,
            "test_accuracy": 0.5,
        },
    ]
    curve = cumulative(lines, {"train.epochs": 5, "method.host_epochs": 2})
    assert curve["bytes"].tolist() == [3, 5]
    assert curve["seconds"].tolist() == [1.5, 2.0]
    assert curve["epochs"].tolist() == [7, 7]  # 5 and, in the second exchange, 2; a round without exchange has none
    assert curve["visits"].tolist() == [3, 3]
    assert curve["accuracy"].dropna().to_dict() == {2: 0.5}


def test_the_numbers_of_a_run(tmp_path):
    """Ten of eleven evaluations: (0.1 x 5 + 0.3 x 5) / 10 = 0.2, or (0.1 x 4 + 0.3 x 5 + 0.2) / 10 = 0.21."""
    write_run(tmp_path, [0.1] * 5 + [None] + [0.3] * 5 + [0.2])
    (run,), notes = load_runs([tmp_path])
    found = run.measures()
    assert notes == []
    assert found["smoothed"] == pytest.approx(0.21)
    assert (found["final"], found["best"], found["bytes"]) == (0.2, 0.3, 12 * 1_500_000)
    assert found["last_ten"] == pytest.approx(0.21)
    assert run.reach(0.25) == 7
    assert run.reach(0.25, "bytes") == pytest.approx(7 * 1.5)
    assert run.reach(0.9) != run.reach(0.9)  # NaN
    assert run.until(5).measures()["best"] == 0.1
    assert run.until(5).settings["rounds"] == 5


def test_rarer_evaluations_are_those_of_the_rounds_that_divide(tmp_path):
    write_run(tmp_path, [0.1, 0.2, 0.3, 0.4])
    (run,), _ = load_runs([tmp_path], every=2)
    assert run.accuracy.to_dict() == {2: 0.2, 4: 0.4}
    write_run(tmp_path / "other", [0.1, None, 0.3, None])
    _, notes = load_runs([tmp_path], every=2)
    assert any("not evaluated every 2 rounds" in note for note in notes)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / ".hydra" / "config.yaml").unlink(), "no .hydra/config.yaml"),
        (lambda folder: (folder / "metrics.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n'), "line 2"),
        (lambda folder: (folder / "metrics.jsonl").write_text('{"round": 1}\n'), "no round was evaluated"),
        (lambda folder: (folder / "result.json").unlink(), "unfinished"),
    ],
)
def test_a_folder_that_cannot_be_used_is_left_out_with_the_reason(tmp_path, spoil, words):
    write_run(tmp_path / "good", [0.1, 0.2])
    spoil(write_run(tmp_path / "bad", [0.1, 0.2, 0.3]))
    runs, notes = load_runs([tmp_path])
    assert [run.path.name for run in runs] == ["good"]
    (note,) = notes
    assert words in note


def test_a_line_that_was_cut_off_is_unfinished_and_counted_if_asked_for(tmp_path):
    folder = write_run(tmp_path, [0.1, 0.2, 0.3], config(rounds=5), finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "test_acc')
    with pytest.raises(DataError, match="unfinished"):
        load_runs([tmp_path])
    (run,), (note,) = load_runs([tmp_path], unfinished=True)
    assert run.rounds == 3
    assert "3 of 5 rounds" in note
    assert "cut off" in note


def test_a_repeated_round_counts_once(tmp_path):
    folder = write_run(tmp_path, [0.1, 0.2])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 2, "test_accuracy": 0.4}) + "\n")
    (run,), _ = load_runs([tmp_path])
    assert run.accuracy.to_dict() == {1: 0.1, 2: 0.4}


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_runs([tmp_path / "none"])


@pytest.mark.parametrize(("host", "epochs"), [(None, [15.0, 30.0, 35.0]), (2, [9.0, 18.0, 23.0])])
def test_the_axes_count_every_exchange(tmp_path, host, epochs):
    # N_e = 2 with 5 local epochs: three exchanges per round, 5 + 2 * 5 epochs, or 5 + 2 * 2 if hosts train for 2. In
    # round 3 only one client was left after phase I: one exchange.
    values = config("fedct", rounds=3)
    values["method"] |= {"exchanges": 2, "host_epochs": host}
    folder = write_run(tmp_path / "run", [0.1, 0.2, 0.3], values)
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, exchanges in zip(lines, (3, 3, 1)):
        line["exchanges"] = exchanges
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_folder(folder)
    assert run.axis("epochs").tolist() == epochs
    assert run.axis("exchanges").tolist() == [3.0, 6.0, 7.0]
    assert run.axis("rounds").tolist() == [1.0, 2.0, 3.0]


def test_methods_with_one_exchange_are_as_before(tmp_path):
    run = read_folder(write_run(tmp_path / "run", [0.1, 0.2]))
    assert run.axis("epochs").tolist() == [5.0, 10.0]
