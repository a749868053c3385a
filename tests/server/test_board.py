import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedcross
from fedcross.server import live
from fedcross.server.live import LivePage, http
from fedcross.server.live.http import metrics

STARTED = {"run": "r", "method": "fedcross", "task": "digits", "engine": "local", "rounds": 10, "after_round": 2}


class Ticking:
    now = 1000.0

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    ticking = Ticking()
    monkeypatch.setattr(live, "time", ticking)
    monkeypatch.setattr(live, "serve", lambda *_: None)
    return ticking


def sent(slot, client, node=7):
    return {"round": 3, "exchange": 0, "slot": slot, "client": client, "node": node, "bytes_down": 10}


def entry(number, **more):
    sums = {"clients": 2, "dropped": 1, "clipped": 0, "spares": 0, "bytes_down": 20, "bytes_up": 10, "seconds": 4.0}
    return {"round": number, "test_accuracy": 0.5, "seconds_training": 3.0, **sums, **more}


def played(clock):
    """Two slots: one accepted after 3 s, one whose reply is rejected."""
    board = LivePage(Path(), ("127.0.0.1", 0))
    board.run_started(STARTED, [])
    board.request("round_started", {"round": 3, "clients": [4, 5]})
    board.request("request_sent", sent(0, 4))
    board.request("request_sent", sent(1, 5))
    clock.now += 3
    board.request("reply_accepted", sent(0, 4) | {"seconds": 3.0, "bytes_up": 10})
    return board


def test_slots_devices_and_what_is_waited_for(clock):
    board = played(clock)
    seen = board.snapshot()
    assert [(one["slot"], one["client"], one["state"]) for one in seen["slots"]] == [(0, 4, "accepted"), (1, 5, "out")]
    assert seen["waiting"] == "1 replies"
    board.request("reply_rejected", sent(1, 5) | {"reason": "non_finite", "detail": "w"})
    board.request("reply_rejected", sent(0, 4) | {"reason": "duplicate", "detail": ""})  # the slot keeps its reply
    seen = board.snapshot()
    assert [one["state"] for one in seen["slots"]] == ["accepted", "non_finite"]
    assert seen["waiting"] is None
    assert [(one["client"], one["visits"], one["seconds"], one["rejected"]) for one in seen["devices"]] == [
        (4, 1, 3.0, 1),
        (5, 0, 0.0, 1),
    ]
    assert seen["rejected"] == {"non_finite": 1, "duplicate": 1}


def test_time_left_is_the_pace_of_this_process_times_the_rounds_that_are_left(clock):
    board = played(clock)
    assert board.snapshot()["left_s"] is None
    clock.now = 1010.0
    board.round_finished(entry(3))
    board.round_finished(entry(4))
    seen = board.snapshot()
    assert (seen["rounds_done"], seen["left_s"]) == (2, 30.0)  # 10 s for two rounds, six to go
    assert seen["totals"]["seconds"] == 8.0
    board.run_ended(None, OSError("disk full"))
    assert (board.snapshot()["state"], board.snapshot()["left_s"]) == ("ended disk full", None)


def test_metrics_are_in_prometheus_text_format(clock, tmp_path):
    board = played(clock)
    board.round_finished(entry(3, pool_similarity_mean=0.9))
    board.request("reply_rejected", sent(1, 5) | {"reason": "non_finite", "detail": ""})
    board.request("round_started", {"round": 3, "connected": 2})
    lines = dict(line.rsplit(" ", 1) for line in metrics(board.snapshot(), tmp_path).splitlines())
    assert all(name.startswith("fedcross_") and float(value) >= 0 for name, value in lines.items())
    assert lines['fedcross_run_info{run="r",method="fedcross",task="digits",seed=""}'] == "1"
    assert lines['fedcross_replies_rejected_total{reason="non_finite"}'] == "1"
    assert (lines["fedcross_round"], lines["fedcross_up"], lines["fedcross_devices_online"]) == ("3", "1", "2")
    assert (lines['fedcross_bytes_total{direction="up"}'], lines["fedcross_pool_similarity"]) == ("10", "0.9")


def test_the_dashboard_asks_for_metrics_that_there_are(clock, tmp_path):
    board = played(clock)
    board.round_finished(entry(3, pool_similarity_mean=0.9))
    board.request("reply_rejected", sent(1, 5) | {"reason": "non_finite", "detail": ""})
    board.checkpoint_written(3, 1.0)
    given = set(re.findall(r"^fedcross_\w+", metrics(board.snapshot(), tmp_path), re.MULTILINE))
    folder = Path(fedcross.__file__).resolve().parents[1] / "deploy" / "metrics" / "grafana" / "dashboards"
    assert set(re.findall(r"fedcross_\w+", (folder / "fedcross.json").read_text())) <= given


def numbers(board, folder):
    lines = dict(line.rsplit(" ", 1) for line in metrics(board.snapshot(), folder).splitlines())
    return {name.removeprefix("fedcross_"): value for name, value in lines.items() if "run_info" not in name}


def test_what_an_alarm_reads_by_hand(clock, tmp_path, monkeypatch):
    """Requests count when they are sent, visits when the round ends; the rounds are those of this process."""
    board = played(clock)
    assert "checkpoint_age_seconds" not in numbers(board, tmp_path)  # no alarm before the first one
    board.round_finished(entry(3, test_accuracy=0.5, clipped=3, spares=4, seconds_aggregation=1.5))
    board.round_finished(entry(4, test_accuracy=0.25, pool_similarity_mean=0.75))
    board.checkpoint_written(4, 1.0)
    clock.now += 60
    monkeypatch.setattr(http, "time", clock)
    monkeypatch.setattr(http.shutil, "disk_usage", lambda _: SimpleNamespace(total=100, used=70, free=30))
    least = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    found = numbers(board, tmp_path)
    assert least <= int(found.pop("memory_peak_bytes")) <= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert found == {
        **{"up": "1", "round": "4", "rounds_planned": "10", "rounds_total": "2", "requests_total": "2"},
        **{"visits_total": "4", "slots_lost_total": "2", "clipped_total": "3", "spares_total": "4"},
        **{'bytes_total{direction="down"}': "40", 'bytes_total{direction="up"}': "20", "devices_online": "0"},
        **{'seconds_total{phase="round"}': "8.0", 'seconds_total{phase="training"}': "6.0"},
        **{'seconds_total{phase="aggregation"}': "1.5", "disk_free_bytes": "30", "checkpoint_age_seconds": "60.0"},
        **{"test_accuracy": "0.25", "pool_similarity": "0.75"},
    }
    board.run_ended(None)
    assert (numbers(board, tmp_path)["up"], board.snapshot()["state"]) == ("0", "stopped")


def test_a_long_run_s_curve_is_thinned_and_ends_with_the_newest_round(clock):
    board = LivePage(Path(), ("127.0.0.1", 0))
    board.run_started(STARTED, [entry(number) for number in range(1, 401)])
    assert len(board.snapshot()["curve"]) == 400
    board.round_finished(entry(401, test_accuracy=None))  # not evaluated: no point
    board.round_finished(entry(402))
    board.round_finished(entry(403))
    curve = [point["round"] for point in board.snapshot()["curve"]]
    assert (len(curve), curve[:2], curve[-1]) == (201, [2, 4], 403)


def test_the_devices_that_were_heard_last_are_shown(clock):
    """103 devices: 0 is never heard, 1 first, 2 next; a lost request is no sign of life."""
    board = LivePage(Path(), ("127.0.0.1", 0))
    board.run_started(STARTED, [])
    for client in range(103):
        board.request("request_sent", sent(client, client))
        clock.now += 1
        if client:
            board.request("reply_accepted", sent(client, client) | {"seconds": 1.0, "bytes_up": 10 + client})
    board.request("reply_accepted", sent(3, 3) | {"seconds": 1.0, "bytes_up": 7})
    board.request("request_lost", sent(0, 0) | {"reason": "lost", "detail": ""})
    found = board.snapshot()
    assert [one["client"] for one in found["devices"]] == list(range(3, 103))
    assert (found["devices"][0]["seen"], found["devices"][0]["bytes_up"]) == (1103.0, 20)
    assert found["slots"][0]["state"] == "lost"
    board.request("round_started", {"round": 4, "clients": []})
    assert (board.snapshot()["slots"], board.snapshot()["totals"]["requests"]) == ([], 103)
