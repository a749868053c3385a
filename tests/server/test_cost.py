"""The cost of a sweep: two measured rounds of each distinct cell, multiplied."""

import pytest

from fedcross.core.errors import DataError
from fedcross.server.command_line import checked_plan
from fedcross.server.cost import cells, measure, show

TINY = ["task=digits", "task.limit=120", "partition=iid", "partition.clients=3", "clients_per_round=2"]
TINY += ["train.epochs=1", "engine.workers=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_seeds_and_lengths_share_a_cell():
    plan = checked_plan(["-m", *TINY, "method=fedavg,fedcross", "seed=1,2", "rounds=10", "evaluate_every=4"])
    found = cells(plan)
    assert [(cell.names["method"], cell.runs, cell.rounds) for cell in found] == [
        ("fedavg", 2, 20),
        ("fedcross", 2, 20),
    ]
    assert found[0].evaluations == 2 * 3  # rounds 4, 8 and 10


def test_only_what_is_left_of_a_run_costs_and_evaluations_count(tmp_path, capsys):
    """Rounds 1 to 4 are done, stop_at=8: four rounds of 1350 s, and an evaluation of 1800 s after round 8."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n" * 4)
    found = checked_plan([*TINY, "rounds=10", "stop_at=8", "evaluate_every=4", "output=run"])
    assert [(cell.runs, cell.rounds, cell.evaluations) for cell in cells(found)] == [(1, 4, 1)]
    stopped = checked_plan([*TINY, "rounds=10", "stop_at=7", "evaluate_every=4", "output=run"])
    assert [cell.evaluations for cell in cells(stopped)] == [0]
    show(found, lambda _: (1350.0, 1800.0))
    assert "2 hours" in capsys.readouterr().out


def test_a_table_with_a_total_and_the_reason_for_a_cell_without(capsys):
    def pace(settings):
        if "method=fedcross" in settings:
            raise DataError("no data here")
        return 36.0, 0.0

    show(checked_plan(["-m", *TINY, "method=fedavg,fedcross", "rounds=100"]), pace)
    out = capsys.readouterr().out
    assert "no data here" in out
    assert "1" in out.split("total")[1].split()


@pytest.mark.slow
def test_two_real_rounds_give_seconds():
    seconds, evaluation = measure([*TINY, "method=fedavg"])
    assert seconds > 0
    assert evaluation >= 0
