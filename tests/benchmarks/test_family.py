"""The benchmark of the pool methods measures what it says; its times are not judged here."""

import argparse
import json
import subprocess

from benchmarks import family


def test_a_case_gives_a_time_for_every_method():
    result = family.case("lenet5", 3, 1, 0.0)
    assert set(result["median"]) == {"read", "scale", "bound", "total", *family.METHODS}
    assert all(seconds > 0 for seconds in result["median"].values())


def test_the_rows_have_the_table_s_columns(monkeypatch):
    times = dict.fromkeys(("read", "scale", "total", *family.METHODS), 0.75) | {"bound": 0.5}
    said = json.dumps({"median": times, "repetitions": 3, "foreign": 0.1})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: argparse.Namespace(stdout=said))
    rows = family.rows("lenet5", 4, argparse.Namespace(repeats=1, patience=0.0))
    assert {row.count("|") for row in rows} == {family.HEADER.count("|")}
    assert "| 4 | 62k (lenet5) | fedmr | 0.750 | **1.50** | 3 | 10% |" in rows
    assert len(rows) == 1 + len(family.METHODS)
