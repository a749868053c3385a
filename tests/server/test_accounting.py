import json

import pytest

from fedcross.core.errors import FederationError, StorageError
from fedcross.server.accounting import Ledger, refuse_idle, result, write_atomically
from fedcross.server.session import line
from fedcross.strategies.round.federation import RoundReport
from fedcross.tasks.scoring import Score


def entry(number, accuracy=0.5):
    return line(RoundReport(number, clients=2, bytes_down=10, bytes_up=5), Score(accuracy, 1.0, ()), 0.1)


def test_the_line_has_what_the_design_lists():
    listed = {
        "round", "test_accuracy", "test_loss", "train_loss", "clients", "dropped", "bytes_down", "bytes_up", "seconds",
        "seconds_training", "seconds_aggregation",
    }  # fmt: skip
    assert listed <= entry(1).keys()
    assert line(RoundReport(1), None, 0.1)["test_accuracy"] is None


def test_the_result_has_what_the_design_lists():
    names = ("method", "task", "model", "partition", "seed", "engine", "device")
    found = result([entry(1, 0.2), entry(2, 0.6), entry(3, 0.4)], dict.fromkeys(names, "x"))
    assert (found["final_accuracy"], found["best_accuracy"], found["rounds"]) == (0.4, 0.6, 3)
    assert found["bytes_total"] == 45
    assert {*names, "rounds", "smoothed_accuracy", "seconds_total", "versions", "commit"} <= found.keys()


def test_the_last_ten_evaluations_are_averaged_without_a_maximum():
    # Eleven evaluations 1, 0, ..., 0, .5: the largest moving mean is the first ten's, .1; the last ten's is .05.
    lines = [entry(1, 1.0), *(entry(r, 0.0) for r in range(2, 11)), entry(11, 0.5), entry(12, None)]
    found = result(lines, {})
    assert found["last_ten_accuracy"] == pytest.approx(0.05)
    assert found["smoothed_accuracy"]["mean"] == pytest.approx(0.1)
    assert result([entry(1, 0.2), entry(2, 0.4)], {})["last_ten_accuracy"] == pytest.approx(0.3)
    assert result([entry(1, None)], {})["last_ten_accuracy"] is None


def test_replies_by_width_are_summed_and_a_width_that_never_went_out_has_none():
    counted = [{"width_replies": {"1": 0, "0.4": 2}}, {}, {"width_replies": {"0.4": 1}}]
    lines = [entry(number) | one for number, one in enumerate(counted, 1)]
    assert result(lines, {})["width_replies"] == {"1": 0, "0.4": 3}
    lines[1]["width_accuracy"] = {"1": 0.5, "0.66": 0.5, "0.4": 0.5}
    assert list(result(lines, {})["width_replies"].items()) == [("1", 0), ("0.66", 0), ("0.4", 3)]
    assert "width_replies" not in result([entry(1)], {})


def test_lost_lines_are_counted_and_the_last_evaluation_stands_for_the_last_of_them():
    lines = [entry(1, 0.2) | {"width_accuracy": {"1": 0.2}}, entry(3, 0.4)]
    gap = result(lines, {}, Score(0.9, 1.0, ()), 3)
    assert (gap["rounds"], gap["rounds_missing"], gap["final_accuracy"]) == (3, 1, 0.4)
    cut = result(lines, {}, Score(0.9, 1.0, ()), 8, {"1": 0.9})
    assert (cut["rounds"], cut["rounds_missing"], cut["final_accuracy"], cut["best_accuracy"]) == (8, 6, 0.9, 0.9)
    assert cut["width_accuracy"] == {"1": 0.9}
    assert result([], {}, Score(0.9, 1.0, ()), 2)["final_accuracy"] == 0.9
    assert "rounds_missing" not in result([entry(1)], {}, Score(0.9, 1.0, ()), 1)


def test_a_continued_ledger_drops_later_and_broken_lines(tmp_path):
    ledger = Ledger(tmp_path)
    for number in (1, 2, 3):
        ledger.add(entry(number))
    ledger.close()
    with ledger.path.open("a") as file:
        file.write('{"round": 4, "test_acc')
    continued = Ledger(tmp_path, keep_until=2)
    continued.add(entry(3))
    continued.close()
    assert [json.loads(text)["round"] for text in ledger.path.read_text().splitlines()] == [1, 2, 3]


def test_a_ledger_without_a_place_says_so(tmp_path):
    with pytest.raises(StorageError, match="Choose another output folder"):
        Ledger(tmp_path / "not-there")


def test_writing_replaces_whole_files(tmp_path):
    write_atomically(tmp_path / "a", b"one")
    write_atomically(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_continued_ledger_names_gaps_and_repetitions(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fedcross.server.accounting.log", lambda level, text, *more: told.append(text % more))
    ledger = Ledger(tmp_path)
    for number in (1, 2, 2, 5):
        ledger.add(entry(number, 0.1 * number))
    ledger.close()
    with ledger.path.open("ab") as file:
        file.write(b'\xff\xfe\n{"\xe4": 1}\n{"round": 3, "bytes_down": "x"}\n[]\n')
    continued = Ledger(tmp_path, keep_until=5)
    continued.close()
    assert [one["round"] for one in continued.lines] == [1, 2, 5]
    assert [text.split("metrics.jsonl: ")[1].split(" more")[0].split(" missing")[0] for text in told] == [
        "round 2 is", "rounds 3, 4 are",
    ]  # fmt: skip


def test_a_line_is_strict_json_and_on_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("fedcross.server.accounting.os.fsync", synced.append)
    ledger = Ledger(tmp_path)
    before = len(synced)
    ledger.add({**entry(1), "train_loss": float("inf"), "pool_spread": float("nan")})
    assert len(synced) == before + 1
    text = ledger.path.read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (found["train_loss"], found["pool_spread"]) == (None, None)
    ledger.close()


def test_a_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / "a.part").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_bytes() == b"kept"


def idle(**line):
    """Return the lines of a run of one round."""
    return [{"bytes_up": 0, "train_loss": None, "rejected": {}, **line}]


def test_a_run_is_idle_if_slots_were_lost_and_no_reply_was_accepted():
    """Of ten slots two have clients that are connected, after a restart: both are trained, so it is not."""
    refuse_idle(idle(clients=2, dropped=8, bytes_up=39504, train_loss=2.1))
    refuse_idle(idle(clients=0, dropped=0))  # nobody was to be asked
    for asked in (0, 3, 6):
        with pytest.raises(
            FederationError, match=r"^1 round and not one accepted reply \(no answer\).*Raise clock\.deadline_s"
        ):
            refuse_idle(idle(clients=asked, dropped=3))
    with pytest.raises(FederationError, match=r"^2 rounds and .*non_finite 6.*The warnings above say"):
        refuse_idle(2 * idle(clients=3, dropped=3, rejected={"non_finite": 3}))


def test_a_replay_without_an_accepted_visit_blames_its_record():
    """No deadline of the replay's own loses a visit."""
    with pytest.raises(FederationError, match=r"The record of clock\.events accepted none.*Name another") as told:
        refuse_idle(idle(clients=0, dropped=3), replayed=True)
    assert "deadline" not in str(told.value)
