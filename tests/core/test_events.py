import io
import json
import logging

import pytest
from flwr.common.logger import log

from fedcross.core import events
from fedcross.core.errors import StorageError
from tests.support.command import main


def written(text):
    return [json.loads(line) for line in text.splitlines()]


def test_text_is_for_people_and_has_no_events(capsys):
    events.emit("run_stopped", run="x", rounds=1)
    events.say("hello")
    events.relay("a line")
    assert capsys.readouterr() == ("hello\na line\n", "")


def test_a_pipe_shows_each_line_at_once(monkeypatch):
    seen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(seen)))
    for write in (events.say, events.relay):
        write("a line")
        assert seen.getvalue().decode().endswith("a line\n")
        seen.truncate(0)


def test_everything_is_one_event_per_line_inside_the_block(capsys):
    with events.log_format("json"), events.log_format("text"):
        events.emit("round_finished", round=1, loss=float("nan"))
        events.say("two\nlines")
        log(30, "fedcross: reply of client %s rejected", 3)
        log(20, "Starting")
        events.relay('{"event":"slot_lost","slot":1,"time":"2026-01-01T00:00:00.000Z"}')
        events.relay('{"event":"invented"}')
        events.failed(StorageError("disk full"))
    out, err = capsys.readouterr()
    found = written(err)
    assert out == ""
    assert all({"time", "event"} <= event.keys() and event["event"] in events.EVENTS for event in found)
    assert [{name: value for name, value in event.items() if name != "time"} for event in found] == [
        {"event": "round_finished", "round": 1, "loss": None},
        {"event": "message", "level": "INFO", "text": "two\nlines"},
        {"event": "message", "level": "WARNING", "text": "reply of client 3 rejected"},
        {"event": "flower", "level": "INFO", "text": "Starting"},
        {"event": "slot_lost", "slot": 1},
        {"event": "flower", "level": "INFO", "text": '{"event":"invented"}'},
        {"event": "run_failed", "error": "StorageError", "text": "disk full", "exit_code": 2},
    ]
    assert found[4]["time"] == "2026-01-01T00:00:00.000Z"
    events.say("text again")
    assert capsys.readouterr().out == "text again\n"


def test_json_is_written_once_if_flowers_handler_comes_later(capsys, monkeypatch):
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [])
    with events.log_format("json"):
        logger.addHandler(logging.StreamHandler())  # as Flower does when it is imported
        log(30, "fedcross: reply rejected")
    assert [event["text"] for event in written(capsys.readouterr().err)] == ["reply rejected"]
    log(30, "fedcross: reply rejected")
    assert capsys.readouterr().err == "fedcross: reply rejected\n"


SMALL = ["task=digits", "task.limit=300", "task.limit_test=100", "partition.clients=3", "clients_per_round=3"]


@pytest.mark.slow
def test_a_run_tells_its_whole_story_in_documented_events(tmp_path, capsys):
    quick = ["rounds=2", "train.epochs=1", "logger=none", "engine.workers=1", "log.format=json", "log.audit=true"]
    assert main([*SMALL, *quick, f"output={tmp_path / 'run'}"]) == 0
    out, err = capsys.readouterr()
    found = written(err)
    assert out == ""
    names = [event["event"] for event in found if event["event"] not in ("message", "flower")]
    per_round = [
        "round_started",
        *["request_sent"] * 3,
        *["reply_accepted"] * 3,
        "round_finished",
        "checkpoint_written",
    ]
    assert names == ["run_started", *per_round, *per_round, "run_finished"]
    for event in found:
        if event["event"] != "round_finished":
            assert event.keys() - {"time", "event"} <= set(events.EVENTS[event["event"]].split()), event
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found[-1]["audit_sha256"] == result["audit"]["sha256"]


def test_a_run_that_fails_says_so_in_the_same_form(tmp_path, capsys):
    assert main(["method=fedcros", "log.format=json", f"output={tmp_path}"]) == 2
    [event] = [one for one in written(capsys.readouterr().err) if one["event"] == "run_failed"]
    assert (event["error"], event["exit_code"]) == ("ConfigError", 2)
    assert "fedcross" in event["text"]
