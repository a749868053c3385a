"""Records are small, name no place of this machine, and carry everything that a report needs."""

import hashlib
import json
from pathlib import Path

import pytest

from fedcross.analysis.groups import group_runs
from fedcross.analysis.loading import load_runs
from fedcross.analysis.records import neutral, record, short, write_page
from fedcross.analysis.tables import accuracy_table
from fedcross.core.errors import ConfigError, DataError
from tests.support.command import subcommand
from tests.support.fake import config, write_run

main = subcommand("record")


def run(folder: Path, accuracy: list[float | None], method: str = "fedavg", seed: int = 1) -> Path:
    settings = config(method, seed, len(accuracy), data_root="/home/me/data", output=str(folder), task__root="/home/me")
    write_run(folder, accuracy, settings)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"task": "cifar10"}))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "round-000003.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_record_gives_the_same_report_and_holds_no_model(tmp_path):
    runs = [run(tmp_path / "runs" / str(i), [0.1, None, 0.5 + i / 100], seed=i) for i in (1, 2)]
    folders = record([tmp_path / "runs"], "table2", tmp_path / "results")
    assert len(folders) == len(runs)
    kept = sorted(str(p.relative_to(folders[0])) for p in folders[0].rglob("*") if p.is_file())
    assert kept == [".hydra/config.yaml", "metrics.jsonl", "result.json"]

    def table(where: Path) -> object:
        return accuracy_table(group_runs(load_runs([where]).runs)[0])

    assert table(tmp_path / "results") == table(tmp_path / "runs")
    everything = "".join(p.read_text() for p in (tmp_path / "results").rglob("*") if p.is_file())
    assert "/home" not in everything
    assert str(tmp_path) not in everything


def test_a_run_recorded_again_replaces_itself(tmp_path):
    run(tmp_path / "runs" / "a", [0.1, 0.2, 0.3])
    (first,) = record([tmp_path / "runs"], "n", tmp_path / "results")
    run(tmp_path / "later" / "a", [0.1, 0.2, 0.4])
    run(tmp_path / "later" / "b", [0.1, 0.2, 0.5], seed=2)
    again = record([tmp_path / "later"], "n", tmp_path / "results")
    assert first in again
    assert len(list((tmp_path / "results" / "n").iterdir())) == 2
    assert load_runs([first]).runs[0].final == 0.4


def test_a_run_recorded_again_keeps_its_checkpoints(tmp_path, capsys):
    """Without --checkpoints; other ones, and those of another run, go with a line that says so."""
    folder = run(tmp_path / "runs", [0.1, 0.2, 0.3])
    for number in (1, 2):
        (folder / "checkpoints" / f"round-00000{number}.safetensors").write_bytes(b"weights")

    def names():
        return sorted(path.stem[-1] for path in home.glob("checkpoints/*"))

    (home,) = record([folder], "n", tmp_path / "results", checkpoints=2)
    record([folder], "n", tmp_path / "results")
    assert names() == ["1", "2"]
    assert capsys.readouterr().err == ""
    record([folder], "n", tmp_path / "results", checkpoints=1)
    assert names() == ["1"]
    assert capsys.readouterr().err == f"{home}: its checkpoints round-000002 are removed: others were asked for.\n"
    record([run(tmp_path / "later", [0.1, 0.2, 0.4])], "n", tmp_path / "results")
    assert names() == []
    told = f"{home}: its checkpoints round-000001 are removed: they are of the record that is replaced.\n"
    assert capsys.readouterr().err.endswith(told)


def test_replays_of_several_records_have_records_of_their_own(tmp_path, capsys):
    """Names of other records are what they were; who replaces another run's record is told whose."""
    (plain,) = record([run(tmp_path / "plain", [0.1])], "n", tmp_path / "results")
    digest = hashlib.sha256((plain / ".hydra" / "config.yaml").read_bytes()).hexdigest()
    assert plain.name == f"fedavg-cifar10-seed1-{digest[:8]}"
    for name in ("a", "b"):
        write_run(tmp_path / name, [0.1], config("fedavg", 1, 1, clock={"name": "replay", "events": f"/{name}"}))
        (tmp_path / name / "result.json").write_text('{"method": "fedavg", "task": "cifar10", "seed": 1}')
        (tmp_path / name / "visits.jsonl").write_text(name)
    assert len(record([tmp_path / "a", tmp_path / "b"], "replays", tmp_path / "results")) == 2
    assert len(record([tmp_path / "a"], "replays", tmp_path / "results")) == 1
    assert len(list((tmp_path / "results" / "replays").iterdir())) == 2
    assert capsys.readouterr().err == ""
    (one,) = record([run(tmp_path / "c", [0.2]), run(tmp_path / "d", [0.3])], "n", tmp_path / "results")
    first, second = capsys.readouterr().err.splitlines()
    assert f"{one}: this record of another run is replaced by that of {tmp_path / 'c'}:" in first
    assert f"{one}: this record of {tmp_path / 'c'} is replaced by that of {tmp_path / 'd'}:" in second


def test_runs_on_several_data_sets_have_records_of_their_own(tmp_path, capsys):
    """Each replaces its own; a record of an older version, which does not say its data, is replaced as before."""
    for name in ("a", "b"):
        result = json.loads((run(tmp_path / name, [0.1]) / "result.json").read_text())
        (tmp_path / name / "result.json").write_text(json.dumps(result | {"data": {"train": name * 64}}))
    older = run(tmp_path / "older", [0.1])
    home = tmp_path / "results"
    a, b = (record([tmp_path / name], "n", home)[0] for name in "ab")
    assert a != b
    assert record([tmp_path / "b", tmp_path / "a"], "n", home) == sorted([a, b])
    assert record([older], "n", home) == [a]
    assert record([tmp_path / "b"], "n", home) == [b]
    assert record([tmp_path / "a"], "n", home) == [a]
    assert len(record([tmp_path / "b", tmp_path / "a"], "other", home)) == 2
    assert len(group_runs(load_runs([home / "n"]).runs)[0]) == 2
    assert capsys.readouterr().err == ""


def test_a_run_whose_settings_changed_has_a_record_of_its_own_and_a_line_says_so(tmp_path, capsys):
    changed = run(tmp_path / "changed", [0.2])
    result = json.loads((changed / "result.json").read_text())
    change = {"after": 1, "setting": "clients_per_round", "from": 5, "to": 10}
    (changed / "result.json").write_text(json.dumps(result | {"changes": [change]}))
    assert len(record([run(tmp_path / "whole", [0.1]), changed], "n", tmp_path / "results")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{changed}: its settings changed on the way" in line
    assert "clients_per_round 5 to round 1, then 10" in line


def test_places_become_neutral():
    was = {
        "data_root": "/a/b",
        "output": "/c",
        "task": {"name": "x", "root": "/a/b"},
        "vectors": "/v/glove.npy",
        "k": [1],
    }
    assert neutral(was) == {
        "data_root": "data", "output": None, "task": {"name": "x", "root": "data"}, "vectors": "glove.npy", "k": [1],
    }  # fmt: skip


def test_a_line_keeps_six_digits_and_no_empty_fields():
    line = {
        "round": 3,
        "test_accuracy": None,
        "rejected": {},
        "train_loss": 0.123456789,
        "bytes_up": 123456789,
        "dropped": 0,
    }
    assert short(line) == {"round": 3, "train_loss": 0.123457, "bytes_up": 123456789, "dropped": 0}


def test_too_large_is_refused_before_anything_is_written(tmp_path):
    run(tmp_path / "runs", [0.1] * 50)
    with pytest.raises(ConfigError, match=r"MB, the limit is 0\.001 MB.*--limit-mb"):
        record([tmp_path / "runs"], "n", tmp_path / "results", limit_mb=0.001)
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_the_page_is_made_from_all_records(tmp_path):
    for seed in (1, 2):
        run(tmp_path / "runs" / f"a{seed}", [0.1, 0.2, 0.25], "fedavg", seed)
        run(tmp_path / "runs" / f"b{seed}", [0.1, 0.3, 0.5], "fedcross", seed)
    arguments = ["--results", str(tmp_path / "results"), "--page", str(tmp_path / "docs" / "results.md")]
    assert main([str(tmp_path / "runs"), "--name", "table2", *arguments]) == 0
    (tmp_path / "results" / "table2" / "NOTE.md").write_text("Measured on a laptop.")
    first = next((tmp_path / "results" / "table2").glob("*/metrics.jsonl"))
    (first.parent / "digests.jsonl").write_text('{"round": 3, "digest": "0"}')
    assert main(arguments) == 0
    text = (tmp_path / "docs" / "results.md").read_text()
    for words in (
        "## table2",
        "Measured on a laptop.",
        "fedcross",
        "4 runs",
        "commit: 0123abc",
        "1 of the 4 records have digests",
    ):
        assert words in text
    assert str(tmp_path) not in text
    assert (tmp_path / "docs" / "images" / "results-table2.png").stat().st_size > 1000
    before = text
    assert write_page(tmp_path / "results", tmp_path / "docs" / "results.md") == before


def test_wrong_use_is_told(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "--name" in capsys.readouterr().err
    assert main([str(tmp_path), "--name", "../x"]) == 2
    assert main(["--results", str(tmp_path / "none")]) == 2
    assert "no records" in capsys.readouterr().err
    with pytest.raises(DataError):
        record([tmp_path], "n", tmp_path / "results")


@pytest.mark.slow
def test_a_section_shows_other_records_at_equal_rounds(tmp_path):
    results, page = tmp_path / "results", tmp_path / "results.md"
    run(tmp_path / "long", [0.1, 0.2, 0.9])
    record([tmp_path / "long"], "long", results)
    run(tmp_path / "short", [0.3, 0.4], "fedcross")
    record([tmp_path / "short"], "short", results)
    (results / "short" / "section.json").write_text('{"also": ["long"], "until": 2}')
    section = write_page(results, page).split("## short")[1]
    assert "| fedavg   | 20.00" in section
    assert "| fedcross | 40.00" in section
    assert "90.00" not in section


@pytest.mark.slow
def test_a_section_names_its_targets(tmp_path):
    results, page = tmp_path / "results", tmp_path / "results.md"
    run(tmp_path / "run", [0.1, 0.3, 0.6])
    record([tmp_path / "run"], "n", results)
    (results / "n" / "section.json").write_text('{"targets": [0.25, 0.55], "x": "bytes", "at": [3]}')
    section = write_page(results, page)
    assert "| 25 %   | fedavg | 1 of 1  | 2 " in section
    assert "| round 3 % |" in section
    assert "| 55 %   | fedavg | 1 of 1  | 3 " in section


@pytest.mark.slow
def test_a_section_of_other_records_alone(tmp_path):
    """Of chosen methods, with the evaluations that all have."""
    results = tmp_path / "results"
    for name, accuracies in (("fedavg", [0.1, 0.2]), ("fedcross", [0.3, 0.4]), ("moon", [0.7, 0.8])):
        run(tmp_path / name, accuracies, name)
    record([tmp_path], "all", results)
    (results / "pair").mkdir()
    (results / "pair" / "section.json").write_text('{"also": ["all"], "every": 2, "methods": ["fedavg", "fedcross"]}')
    section = write_page(results, tmp_path / "page.md").split("## pair")[1]
    assert "| fedavg   | 20.00   | 20.00 " in section
    assert "| fedcross | 40.00   | 40.00 " in section
    assert "moon" not in section
    assert "2 runs." in section


@pytest.mark.slow
def test_a_row_has_the_name_that_its_section_gives(tmp_path):
    record([run(tmp_path / "runs", [0.1])], "n", tmp_path / "results")
    (tmp_path / "results" / "n" / "section.json").write_text('{"names": {"fedavg": "plain average"}}')
    text = write_page(tmp_path / "results", tmp_path / "page.md")
    assert "| plain average " in text
    assert "| fedavg " not in text


def test_the_page_begins_with_its_contents_in_the_order_that_is_asked_for(tmp_path):
    results, page = tmp_path / "results", tmp_path / "results.md"
    for name in ("a", "b", "c"):
        run(tmp_path / name, [0.1])
        record([tmp_path / name], name, results)
    assert "## Contents" not in write_page(results, page)
    (results / "contents.json").write_text('{"First": {"c": "the last"}, "Then": {"a": "the first"}}')
    text = write_page(results, page)
    listed = "- First\n    - [c](#c): the last\n- Then\n    - [a](#a): the first\n- Others\n    - [b](#b)\n"
    assert f"## Contents\n\n{listed}" in text
    assert text.index("\n## c\n") < text.index("\n## a\n") < text.index("\n## b\n")


@pytest.mark.parametrize("text", ['{"First": {"none": "x"}}', '{"First": "n"}', '["n"]', "nonsense"])
def test_damaged_contents_are_told(tmp_path, text):
    run(tmp_path / "runs", [0.1])
    record([tmp_path / "runs"], "n", tmp_path / "results")
    (tmp_path / "results" / "contents.json").write_text(text)
    with pytest.raises(DataError, match=r"contents\.json"):
        write_page(tmp_path / "results", tmp_path / "page.md")


WRONG = ['{"until": 0}', '{"untl": 2}', '{"targets": [50]}', '{"targets": 0.5}', '{"x": "y"}', '["long"]']
WRONG += ['{"at": [0]}', '{"every": 0}', '{"every": "2"}', '{"methods": "fedavg"}', "nonsense"]
WRONG += ['{"names": {"fedprox": "another"}}', '{"names": {"fedavg": 1}}', '{"names": "fedavg"}']


@pytest.mark.parametrize("text", WRONG)
def test_a_damaged_section_is_told(tmp_path, text):
    run(tmp_path / "runs", [0.1])
    record([tmp_path / "runs"], "n", tmp_path / "results")
    (tmp_path / "results" / "n" / "section.json").write_text(text)
    with pytest.raises(DataError, match=r"section\.json"):
        write_page(tmp_path / "results", tmp_path / "page.md")
