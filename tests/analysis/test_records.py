"""Records are small, name no path of this machine, and carry everything that a report needs."""

import json

import pandas as pd
import pytest

from docs.results_page import write
from fedcross.analysis.published import cells
from fedcross.analysis.records import load_runs, record
from fedcross.analysis.runs import runs_frame
from fedcross.analysis.tables import accuracy_table
from fedcross.core.errors import ConfigError
from tests.support.command import subcommand
from tests.support.fake import config, write_run

main = subcommand("record")


def run(folder, accuracy, method="fedavg", seed=1):
    places = {"data_root": "/home/me/data", "output": str(folder), "task__root": "/home/me", "task__labels": "/a/b.csv"}
    write_run(folder, accuracy, config(method, seed, len(accuracy), **places))
    (folder / "digests.jsonl").write_text(
        "".join(json.dumps({"round": i, "digest": f"{i}" * 64}) + "\n" for i in (1, 2))
    )
    return folder


def table(where):
    return accuracy_table(runs_frame(load_runs([where])[0])[0]).frame


def test_a_record_gives_the_same_report_and_names_no_path(tmp_path):
    for seed in (1, 2):
        run(tmp_path / "runs" / str(seed), [0.1, None, 0.5 + seed / 100], seed=seed)
    run(tmp_path / "runs" / "3", [0.1, None, 0.7], method="fedcross")
    assert record([tmp_path / "runs"], "table2", tmp_path / "results") == []
    home = tmp_path / "results" / "table2"
    assert sorted(path.name for path in home.iterdir()) == ["curve.csv", "runs.jsonl"]
    pd.testing.assert_frame_equal(table(tmp_path / "results"), table(tmp_path / "runs"))
    text = "".join(path.read_text() for path in home.iterdir())
    assert "/home" not in text
    assert str(tmp_path) not in text
    first, *lines = map(json.loads, (home / "runs.jsonl").read_text().splitlines())
    assert first["experiment"]["task.labels"] == "b.csv"
    assert {line["seed"] for line in lines} == {1, 2}
    assert lines[0]["digests"] == {"1": "1" * 64, "2": "2" * 64}
    assert len((home / "curve.csv").read_text().splitlines()) == 1 + 3 * 2  # evaluated rounds only


def test_a_run_recorded_again_replaces_itself_and_others_stay(tmp_path):
    run(tmp_path / "a", [0.1, 0.2])
    run(tmp_path / "b", [0.1, 0.3], seed=2)
    record([tmp_path / "a", tmp_path / "b"], "n", tmp_path / "results")
    run(tmp_path / "c", [0.1, 0.4], seed=2)
    record([tmp_path / "c"], "n", tmp_path / "results")
    runs, _ = load_runs([tmp_path / "results"])
    assert {one.seed: one.accuracy.iloc[-1] for one in runs} == {1: 0.2, 2: 0.4}


def test_the_page_fills_its_text_from_the_records(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    run(tmp_path / "a", [0.1, 0.2])
    run(tmp_path / "b", [0.1, 0.3], method="fedcross")
    record([tmp_path / "a"], "second", results)
    record([tmp_path / "b"], "first", results)
    (results / "page.md").write_text("{{count}}\n\n{{runs first+second target=30}}\n\n{{runs first}}\n\n{{tables}}\n")
    text = write(results, docs)
    assert text == (docs / "results.md").read_text()
    assert "| fedcross | 1 | 2 | 20.0 | 2 |" in text
    assert "| fedavg | 1 | 2 | 15.0 | not reached |" in text
    assert "| `first` | 1 | 2 |" in text
    assert f"Of {len(cells())} published cells" in text


def test_the_command_refuses_half_a_request_and_wrong_names(tmp_path, capsys):
    run(tmp_path / "a", [0.1, 0.2])
    results = ["--results", str(tmp_path / "results")]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a"), *results])
    assert "--name" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="small letters"):
        record([tmp_path / "a"], "Name/x", tmp_path / "results")
    assert main([str(tmp_path / "a"), "--name", "n", *results]) == 0
    assert capsys.readouterr().out.strip().endswith("n")
