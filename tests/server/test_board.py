import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fedcross.server import board as boards
from fedcross.server.board import Board
from fedcross.server.gauges import RunCollector

STARTED = {"run": "r", "method": "fedcross", "task": "digits", "engine": "local", "rounds": 10, "after_round": 2}


class Ticking:
    now = 1000.0

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    ticking = Ticking()
    monkeypatch.setattr(boards, "time", ticking)
    return ticking


def sent(slot, client, node=7, **place):
    return {"round": 3, "exchange": 0, "slot": slot, "client": client, "node": node, "bytes_down": 10, **place}


def entry(number, **more):
    sums = {"clients": 2, "dropped": 1, "clipped": 0, "spares": 0, "bytes_down": 20, "bytes_up": 10, "seconds": 4.0}
    return {"round": number, "test_accuracy": 0.5, "seconds_training": 3.0, **sums, **more}


def played(clock):
    """Two slots: one accepted after 3 s, one whose reply is rejected."""
    board = Board(60)
    board.note("run_started", STARTED)
    board.note("round_started", {"round": 3, "clients": [4, 5]})
    board.note("request_sent", sent(0, 4))
    board.note("request_sent", sent(1, 5))
    clock.now += 3
    board.note("reply_accepted", sent(0, 4) | {"seconds": 3.0, "bytes_up": 10})
    return board


def test_slots_devices_and_what_is_waited_for(clock):
    board = played(clock)
    seen = board.snapshot()
    assert [(one["slot"], one["client"], one["state"], one["since"]) for one in seen["slots"]] == [
        (0, 4, "accepted", 1000),
        (1, 5, "out", 1000),
    ]
    assert seen["waiting"] == {"what": "1 replies", "until": 1060, "replies": True}
    board.note("reply_rejected", sent(1, 5) | {"reason": "non_finite", "detail": "w"})
    board.note("slot_lost", {"round": 3, "slot": 1, "client": 5, "reason": "non_finite"})
    seen = board.snapshot()
    assert seen["waiting"] is None
    assert seen["slots"][1]["state"] == "non_finite"
    good, bad = seen["devices"]
    assert (good["visits"], good["seconds"], good["seen"], good["rejected"]) == (1, 3.0, 1003, 0)
    assert (bad["visits"], bad["rejected"]) == (0, 1)
    assert seen["rejected"] == {"non_finite": 1}


def test_an_error_that_the_superlink_makes_is_no_sign_of_life(clock):
    board = played(clock)
    for event, heard, rejected in (("request_lost", None, {}), ("reply_rejected", 1003, {"x": 1})):
        board.note(event, sent(1, 5) | {"reason": "x", "detail": "y"})
        seen = board.snapshot()
        assert ({one["client"]: one["seen"] for one in seen["devices"]}[5], seen["rejected"]) == (heard, rejected)
        assert (seen["slots"][1]["state"], seen["waiting"]) == ("x", None)


def test_time_left_follows_the_rounds_of_this_process(clock):
    board = played(clock)
    assert board.snapshot()["left_s"] is None
    clock.now = 1008
    board.note("round_finished", entry(3))
    assert board.snapshot()["left_s"] == 8 * 7  # one round in 8 s, seven left
    board.note("run_finished", {})
    assert (board.snapshot()["left_s"], board.snapshot()["state"]) == (None, "finished")


def test_a_run_that_goes_on_shows_the_curve_from_its_first_round(clock):
    board = Board(60)
    board.note("run_started", STARTED | {"rounds": 5000, "after_round": 2000})
    board.recall([entry(n, test_accuracy=n / 2000 if n % 2 == 0 else None) for n in range(1, 2001)])
    assert len(board.snapshot()["curve"]) <= boards.POINTS
    board.note("round_finished", entry(2001))
    rounds = [one["round"] for one in board.snapshot()["curve"]]
    assert (min(rounds) < 10, rounds[-2:]) == (True, [2000, 2001])
    assert board.totals["clients"] == 2  # counters are those of this process


def test_a_long_run_has_a_short_snapshot(clock):
    board = Board(60)
    board.note("run_started", STARTED | {"rounds": 5000})
    for number in range(3, 2003):
        board.note("request_sent", sent(0, number))
        board.note("reply_accepted", sent(0, number) | {"seconds": 1.0, "bytes_up": 1})
        board.note("round_finished", entry(number))
    seen = board.snapshot()
    assert len(seen["curve"]) == boards.POINTS
    assert seen["curve"][-1]["round"] == 2002
    assert (len(seen["devices"]), seen["devices_known"]) == (boards.DEVICES, 2000)
    assert len(json.dumps(seen)) < 100_000


def test_a_request_that_is_sent_again_is_a_resend(clock):
    board = played(clock)
    board.note("request_sent", sent(1, 5))
    board.note("request_sent", sent(1, 6))  # a spare is none
    assert (board.totals["requests"], board.totals["resends"]) == (4, 1)


def test_metrics_in_prometheus_own_format(clock, tmp_path):
    board = played(clock)
    board.note("reply_rejected", sent(1, 5) | {"reason": "non_finite", "detail": "w"})
    board.note("round_finished", entry(3, pool_similarity_mean=0.75))
    board.note("checkpoint_written", {"round": 3, "seconds": 0.5})
    board.online = 12
    registry = CollectorRegistry()
    registry.register(RunCollector(board, tmp_path))
    lines = dict(
        line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
    )
    wanted = {
        "fedcross_round": 3, "fedcross_rounds_planned": 10, "fedcross_up": 1, "fedcross_rounds_total": 1,
        "fedcross_visits_total": 2, "fedcross_slots_lost_total": 1, 'fedcross_bytes_total{direction="down"}': 20,
        'fedcross_replies_rejected_total{reason="non_finite"}': 1, 'fedcross_seconds_total{phase="training"}': 3,
        'fedcross_seconds_total{phase="checkpoint"}': 0.5, "fedcross_devices_online": 12,
        "fedcross_test_accuracy": 0.5, "fedcross_pool_similarity": 0.75,
    }  # fmt: skip
    assert {name: float(lines[name]) for name in wanted} == wanted
    assert float(lines["fedcross_memory_bytes"]) > 1e6
    assert float(lines["fedcross_disk_free_bytes"]) > 0
