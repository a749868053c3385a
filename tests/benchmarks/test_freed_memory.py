"""The benchmark of kept memory measures a step; its times are not judged here."""

import argparse
import json
import subprocess

from benchmarks import freed_memory


def test_a_step_has_a_time_and_faults(monkeypatch):
    monkeypatch.setitem(freed_memory.MODELS, "lenet5", 2)
    found = freed_memory.case("lenet5", False)
    assert found["seconds"] > 0
    assert found["faults"] >= 0


def test_a_row_has_the_table_s_columns(monkeypatch):
    answers = iter([{"seconds": 0.2, "faults": 50}, {"seconds": 0.1, "faults": 1}] * 3)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: argparse.Namespace(stdout=json.dumps(next(answers))))
    line = freed_memory.row("lenet5", 3)
    assert line == "| lenet5 | 200.0 | 100.0 | **0.50** | 50 | 1 |"
    assert line.count("|") == freed_memory.HEADER.count("|")
