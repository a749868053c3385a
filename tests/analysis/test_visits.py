"""Visits of asynchronous runs: table, picture, and the axes of virtual time and visits."""

import json

import numpy as np
import pytest

from fedcross.analysis.loading import load_run
from fedcross.analysis.report import write_report
from fedcross.analysis.visits import load_visits, visits_table
from tests.support.fake import config, write_run

LINES = [
    {"visit": 0, "slot": 0, "client": 4, "start": 0.0, "finish": 10.0, "accepted": True, "staleness": 0},
    {"visit": 2, "slot": 0, "client": 4, "start": 10.0, "finish": 15.0, "accepted": False, "staleness": 1},
    {"visit": 1, "slot": 1, "client": 7, "start": 0.0, "finish": 30.0, "accepted": True, "staleness": 4},
]


def folder(tmp_path, **changes):
    clock = {"clock": {"name": "virtual"}, "devices": {"name": "uniform"}} | changes
    made = write_run(tmp_path / "run", [0.3, 0.6, 0.8], {**config("fedcross_async", rounds=3), **clock})
    lines = [
        json.loads(line) | {"virtual_seconds": 100.0} for line in (made / "metrics.jsonl").read_text().splitlines()
    ]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made / "visits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"visit": ')
    return made


def test_the_table_counts_visits_clients_slots_and_staleness(tmp_path):
    found = load_visits(folder(tmp_path) / "visits.jsonl", "p", "m")
    assert visits_table([found]).rows == [
        ("p", "m", "3", "33.3", "6.00", "1 / 1.5 / 2", "1 / 1.5 / 2", "2.0 / 3.6 / 4"),
    ]
    assert load_visits(tmp_path / "none") is None
    (tmp_path / "empty").write_text("[1]\n")
    assert load_visits(tmp_path / "empty") is None


def test_virtual_seconds_and_visits_are_axes(tmp_path):
    run = load_run(folder(tmp_path))
    assert run.axis("virtual").tolist() == [100, 200, 300]
    assert run.axis("visits").tolist() == [10, 20, 30]
    assert run.reach(0.5, "virtual") == 200
    plain = load_run(write_run(tmp_path / "plain", [0.5]))
    assert np.isnan(plain.axis("virtual")).all()


@pytest.mark.slow
def test_a_report_shows_the_visits_and_the_virtual_time(tmp_path):
    made = folder(tmp_path)
    text = write_report([made], tmp_path / "report", [0.5], x="virtual", html=False)
    assert "devices uniform" in text
    assert "3m 20s" in text  # 200 virtual seconds
    assert "## Visits" in text
    assert (tmp_path / "report" / "visits.png").stat().st_size > 10_000
    plain = write_run(tmp_path / "plain" / "run", [0.5, 0.7])
    text = write_report([plain], tmp_path / "other", html=False)
    assert "virtual" not in text
    assert "Visits" not in text
    assert not (tmp_path / "other" / "visits.png").exists()
