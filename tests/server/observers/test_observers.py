"""Observers: each one alone, with the five calls."""

import io
import json
from collections import Counter

import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.server.observers.messages import LOGGERS, Bar, PlainLines, open_logger
from fedcross.server.observers.records import Requests, Visits

RUN = {"run": "abc", "method": "fedcross", "task": "digits", "rounds": 4, "after_round": 0}
ENTRY = {"round": 1, "test_accuracy": 0.5, "dropped": 1, "clients": 4, "rejected": {}, "pool_similarity_mean": 0.25}


# ---- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["40", "120"])
def test_the_bar_fits_the_terminal(monkeypatch, columns, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar()
    bar.run_started(RUN, [])
    bar.round_finished(ENTRY)
    bar.run_ended({})
    assert "1/4" in capsys.readouterr().out


def test_a_line_per_evaluated_round_in_percent():
    said = io.StringIO()
    lines = PlainLines(said)
    lines.run_started(RUN, [])
    lines.round_finished(ENTRY | {"round": 2, "test_accuracy": None})
    lines.round_finished(ENTRY | {"round": 3, "test_accuracy": 0.12345})
    assert said.getvalue().endswith("round 3/4  accuracy 12.35 %  pool similarity 0.250  1 of 4 clients lost\n")


# ---- loggers ------------------------------------------------------------------------------------------------------


def test_an_unknown_logger_is_named(tmp_path):
    with pytest.raises(ConfigError, match="'tensorboard'"):
        open_logger({"name": "tensorbord"}, tmp_path, {})
    assert set(LOGGERS) == {"none", "tensorboard", "wandb", "mlflow"}


def test_tensorboard_gets_every_number_and_purges_repeated_rounds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, rounds in ((0, (1, 2, 3)), (1, (2, 3))):
        logger = open_logger({"name": "tensorboard"}, tmp_path, {})
        logger.run_started({**RUN, "after_round": after}, [])
        for number in rounds:
            logger.round_finished({"round": number, "test_accuracy": after + number / 10, "rejected": {}})
        logger.run_ended(None)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(e.step, round(e.value, 1)) for e in found.Scalars("test_accuracy")] == [(1, 0.1), (2, 1.2), (3, 1.3)]


# ---- records ------------------------------------------------------------------------------------------------------


def test_requests_are_on_disk_before_they_are_sent_and_survive_a_crash(tmp_path):
    log = Requests(tmp_path)
    log.run_started(RUN, [])
    for client in (3, 3, 5):
        log.request("request", {"client": client})
    again = Requests(tmp_path, Counter({3: 1, 5: 4}))  # a checkpoint before the crash, and one of an older file
    again.run_started(RUN, [])
    log.run_ended(None)
    again.run_ended(None)
    assert again.counts == {3: 2, 5: 4}
    (tmp_path / "requests.jsonl").write_bytes((tmp_path / "requests.jsonl").read_bytes() + b'{"client": 3, "req')
    assert Requests(tmp_path, Counter()).counts == {3: 2, 5: 4}
    assert Requests(tmp_path).counts == {}
    (tmp_path / "requests.jsonl").unlink()
    (tmp_path / "requests.jsonl").mkdir()
    with pytest.raises(StorageError):
        Requests(tmp_path, Counter())


def test_visits_of_rounds_that_are_repeated_are_removed(tmp_path, caplog):
    def visit(number, round_):
        return {"visit": number, "round": round_, "accepted": True}

    first = Visits(tmp_path)
    first.run_started(RUN, [])
    for number in range(4):
        first.request("visit_ended", visit(number, 1 + number // 2))
    first.round_finished(ENTRY)
    first.run_ended(None)
    second = Visits(tmp_path, keep_until=1, finished=3)
    assert "1 of 3 visits are missing" in caplog.text
    second.run_started(RUN, [])
    second.run_ended(None)
    assert [json.loads(line)["visit"] for line in second.file.path.read_text().splitlines()] == [0, 1]
