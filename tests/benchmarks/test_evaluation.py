"""The benchmark of scoring measures every size on the same images; its times are not judged here."""

from benchmarks import evaluation


def test_every_size_has_a_time_and_all_score_the_same():
    best, same = evaluation.times("lenet5", 20, 1)
    assert set(best) == set(evaluation.BATCHES)
    assert all(seconds > 0 for seconds in best.values())
    assert same


def test_a_row_has_the_table_s_columns(monkeypatch):
    monkeypatch.setattr(
        evaluation, "times", lambda *_: (dict(zip(evaluation.BATCHES, (6.0, 3.0, 2.0, 1.5, 2.0))), True)
    )
    line = evaluation.row("lenet5", 1, 1)
    assert line.count("|") == evaluation.HEADER.count("|")
    assert line.endswith("| **4.0** | yes |")
