"""The benchmarks run in their smallest sizes; their times are not judged."""

import contextlib
import io
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import aggregation, engine, gpu, harness, peers, wire
from benchmarks.harness import Workload


def test_contestants_take_turns_and_a_failing_one_gets_a_row():
    def broken() -> float:
        raise RuntimeError("not installed")

    times = {"loop": iter([2.0, 4.0]), "ours": iter([1.0, 3.0])}
    contestants = {name: (lambda values=values: next(values)) for name, values in times.items()}
    table = harness.in_turns({**contestants, "peer": broken}, 2, "loop").set_index("contestant")
    assert table["ratio"].dropna().to_dict() == {"loop": 1.0, "ours": pytest.approx((0.5 + 0.75) / 2)}
    assert any("not installed" in name for name in table.index)


def test_the_plain_loop_mixes_with_the_least_similar():
    models = [{"w": torch.tensor(row)} for row in ([1.0, 0.0], [1.0, 0.1], [-1.0, 0.0])]
    mixed = aggregation.plain_loop(models)
    assert mixed[0]["w"].tolist() == pytest.approx([0.99 * 1 + 0.01 * -1, 0.0])
    assert mixed[2]["w"].tolist() == pytest.approx([0.99 * -1 + 0.01 * 1, 0.0])


def in_this_process(code, *arguments):
    """Do what a benchmark does in a process of its own; return what its last line says."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        patch.setattr(sys, "argv", ["-c", *map(str, arguments)])
        exec(code, {})
    return json.loads(written.getvalue().splitlines()[-1])


def test_a_child_gives_its_numbers_and_its_memory_or_its_fault():
    found = harness.child("import json, sys; print(json.dumps({'a': int(sys.argv[1])}))", 3)
    assert (found["a"], found["peak MiB"] > 1) == (3, True)
    with pytest.raises(RuntimeError, match="no such file"):
        harness.child("raise OSError('no such file')")


@pytest.mark.slow
@pytest.mark.parametrize("question", [engine, aggregation, wire])
def test_a_question_gives_a_table(question, monkeypatch):
    monkeypatch.setattr(wire, "child", in_this_process)
    monkeypatch.setattr(peers, "second_round", lambda *_: lambda: 1.0)  # the other questions run fedcross
    monkeypatch.setattr(peers, "LOOPS", {"textbook": peers.LOOPS["textbook"]})
    table = question.measure(quick=True)
    assert len(table)
    assert np.isfinite(table.select_dtypes("number")).all(axis=None)
    assert "| --- |" in harness.markdown(table)


@pytest.mark.slow
def test_the_gpu_program_runs_all_its_questions_without_a_gpu(tmp_path, monkeypatch):
    for name, (question, values) in list(gpu.QUESTIONS.items()):
        one = [["batched"] if value == [*gpu.ENGINES] else value for value in values]
        monkeypatch.setitem(gpu.QUESTIONS, name, (question, one))
    assert gpu.main(["--device", "cpu", "--tiny", "--output", str(tmp_path / "gpu.json")]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert set(report["questions"]) == set(gpu.QUESTIONS)
    assert all(lines for lines in report["questions"].values())


def test_a_line_that_fails_is_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.QUESTIONS, "right", (lambda place, one: 1 / 0, [["one"]]))
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "right", "--output", str(tmp_path / "gpu.json")]) == 1
    assert "ZeroDivisionError" in (tmp_path / "gpu.json").read_text()


def test_random_images_are_those_of_all_clients(tmp_path):
    work = Workload(clients=2, examples=3)
    with np.load(harness.images(work, tmp_path)) as data:
        assert data["x"].shape == (6, 3, 32, 32)
