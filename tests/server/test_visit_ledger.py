"""The record of visits, after a run goes on."""

import pytest

from tests.support.federation import run

ASYNC = ("method=fedasync", "devices=uniform")


@pytest.mark.parametrize(("left", "missing"), [(None, 4), (3, 1), (4, 0)])
def test_a_resume_says_how_many_visits_its_record_lacks(tmp_path, caplog, left, missing):
    method = run(tmp_path, *ASYNC, "rounds=2", "clients_per_round=2").method
    file = tmp_path / "visits.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == method.finished == 4
    if left is None:
        file.unlink()
    else:
        file.write_text("".join(lines[:left]))
    caplog.clear()
    run(tmp_path, *ASYNC, "rounds=3", "clients_per_round=2", f"resume={tmp_path}")
    said = f"visits.jsonl: {missing} of the 4 visits of rounds 1 to 2 are missing."
    assert (said in caplog.text) == (missing > 0)
    assert ("are missing" in caplog.text) == (missing > 0)
