"""Tables, and their Markdown, LaTeX and terminal forms."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from fedcross.analysis.formats import latex, markdown
from fedcross.analysis.groups import Spread, group_runs
from fedcross.analysis.loading import load_runs
from fedcross.analysis.table import console_table, duration, percent, size
from fedcross.analysis.tables import (
    Table,
    accuracy_table,
    compact,
    default_target,
    published_table,
    target_table,
    width_table,
)
from tests.support.fake import config, write_run


def test_numbers_for_the_reader():
    assert percent(Spread(0.54781, 0.0056, 3)) == "54.78 ± 0.56"
    assert percent(Spread(0.5, math.nan, 1), 1) == "50.0"
    assert percent(Spread(math.nan, math.nan, 0)) == "–"
    assert [size(n) for n in (0, 999, 1500, 2.5e6, 3e9, 4e12, math.nan)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 GB", "4.0 TB", "–",
    ]  # fmt: skip
    assert [duration(s) for s in (1.25, 59.94, 80, 7500, math.nan)] == ["1.2 s", "59.9 s", "1m 20s", "2h 05m", "–"]


def test_columns_that_say_nothing_are_dropped():
    table = Table("T", ("problem", "method", "published rounds"), [("p", "a", "–"), ("p", "b", "–")])
    found = compact(table)
    assert (found.title, found.header, found.rows) == ("T: p", ("method",), [("a",), ("b",)])
    mixed = Table("T", ("problem", "x"), [("p", "1"), ("q", "–")])
    assert compact(mixed).header == ("problem", "x")


def test_markdown_escapes_its_separator():
    text = markdown(Table("T", ("a", "b"), [("x|y", "1")], "Note."))
    assert text == "## T\n\n| a    | b   |\n|------|-----|\n| x\\|y | 1   |\n\nNote.\n"


def test_latex_escapes_what_latex_reads():
    text = latex([Table("T_1", ("a %", "b"), [("in_order & ± 1", "–"), ("\\x", "< 1")], "50 %.")])
    assert r"\caption{T\_1. 50 \%.}" in text
    assert r"a \% & b \\" in text
    assert r"in\_order \& $\pm$ 1 & -- \\" in text
    assert r"\textbackslash{}x & $<$ 1 \\" in text
    assert r"\begin{tabular}{ll}" in text
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 1


def test_the_mean_of_the_last_ten_stands_beside_the_smoothed_maximum(tmp_path: Path):
    write_run(tmp_path / "1", [1.0, *[0.0] * 9, 0.5], config("fedavg", 1, 11))
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    table = accuracy_table(groups)
    row = dict(zip(table.header, table.rows[0]))
    assert (row["smoothed %"], row["last ten %"], row["final %"]) == ("10.00", "5.00", "50.00")
    assert "moving mean over 10 evaluations;" in (table.note or "")
    write_run(tmp_path / "2", [0.2, 0.5], config("fedcross", 1, 2))
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    assert "10 evaluations (a run with fewer has their mean" in (accuracy_table(groups).note or "")


def test_runs_with_other_evaluations_are_named(tmp_path: Path):
    write_run(tmp_path / "1", [0.1, 0.2, 0.3, 0.4, 0.5], config("fedavg", 1, 5))
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    assert "were evaluated every" not in (accuracy_table(groups).note or "")
    every_second_and_last = [None, 0.2, None, 0.4, None, 0.6, 0.7]
    write_run(tmp_path / "2", every_second_and_last, config("fedcross", 1, 7))
    write_run(tmp_path / "3", [None, None, 0.2], config("fedcross", 2, 3))  # once: no distance
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    assert "were evaluated every 1 or 2 rounds" in (accuracy_table(groups).note or "")


def test_targets_that_only_some_seeds_reach(tmp_path: Path):
    write_run(tmp_path / "1", [0.2, 0.5], config("fedavg", 1, 2))
    write_run(tmp_path / "2", [0.2, 0.3], config("fedavg", 2, 2))
    groups, _ = group_runs(load_runs([tmp_path]).runs)
    rows = [row[3:] for row in target_table(groups, [0.2, 0.4, 0.9]).rows]
    assert rows == [
        ("2 of 2", "1 ± 0", "1.5 MB", "2.0 s", "–", "–"),
        ("1 of 2", "2", "3.0 MB", "4.0 s", "–", "–"),
        ("0 of 2", "never", "–", "–", "–", "–"),
    ]
    assert default_target(groups) == 0.3  # the weaker run's best, and a multiple of 5 %


def test_no_target_below_five_percent(tmp_path: Path):
    write_run(tmp_path / "1", [0.04])
    assert math.isnan(default_target(group_runs(load_runs([tmp_path]).runs)[0]))


def test_guessing_reaches_no_target(tmp_path: Path):
    """A run at chance made a target of 10 % of ten classes, which says nothing."""
    for name, best, classes in (("1", 0.104, 10), ("2", 0.5, 10), ("3", 0.104, 62)):
        write_run(tmp_path / name, [best], config("fedavg", int(name), 1))
        place = tmp_path / name / "result.json"
        result = json.loads(place.read_text()) if place.exists() else {}
        place.write_text(json.dumps(result | {"class_accuracy": [best] * classes}))
    target = [default_target(group_runs(load_runs([tmp_path / n]).runs)[0]) for n in ("1", "2", "3")]
    assert math.isnan(target[0])
    assert target[1:] == [0.5, 0.1]
    assert math.isnan(default_target(group_runs(load_runs([tmp_path / "1", tmp_path / "2"]).runs)[0]))


def test_published_cell_and_difference(tmp_path: Path):
    write_run(tmp_path / "1", [0.60], config("fedcross", 1, 1))
    write_run(tmp_path / "2", [0.60], config("fedcross", 1, 1, task__name="digits"))
    table = published_table(group_runs(load_runs([tmp_path]).runs)[0])
    assert table is not None
    (row,) = table.rows
    assert row[2:] == (
        "60.00", "1", "62.16 ± 0.42", "-2.16", "FedCross Table II, FedCross Table III", "rounds 1 (paper 2000)",
    )  # fmt: skip
    assert published_table([]) is None


@pytest.mark.parametrize("width", [80, 140])
def test_console_table_fits_the_terminal(tmp_path: Path, width: int):
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.3, 0.5], config("fedavg", seed, 2))
        write_run(tmp_path / f"x{seed}", [0.4, 0.6 + 0.1 * seed], config("fedcross", seed, 2))
    out = io.StringIO()
    Console(file=out, width=width).print(console_table(load_runs([tmp_path]).runs))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    (cross,) = [line.split() for line in lines if "fedcross" in line]
    # Final .7 and .8: mean 75 with sample deviation 7.07; smoothed is the mean of both rounds, .55 and .60.
    assert " ".join(cross) == "fedcross 75.0 ± 7.1 75.0 ± 7.1 57.5 ± 3.5 2 3.0 MB 4.0 s"


def test_a_column_for_every_width_over_seeds(tmp_path: Path) -> None:
    """Two seeds of one method with three sizes, one run of a method with two, and one of a method with one size."""
    for name, seed, found in (
        ("fedcross", 1, {"1": 0.5, "0.4": 0.3}),
        ("fedcross", 2, {"1": 0.6, "0.4": 0.5}),
        ("adaptivefl", 1, {"1": 0.4, "0.4@2": 0.35, "0.4": 0.3}),
        ("fedavg", 1, None),
    ):
        folder = tmp_path / f"{name}{seed}"
        write_run(folder, [0.1, 0.2], config(name, seed, rounds=2))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if found is not None:
            lines[0]["width_accuracy"] = dict.fromkeys(found, 0.01)  # only the last evaluation counts
            lines[-1]["width_accuracy"] = found
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = width_table(group_runs(load_runs([tmp_path]).runs)[0])
    assert table is not None
    assert list(table.header[2:]) == ["1", "0.4@2", "0.4"]
    assert {row[1]: list(row[2:]) for row in table.rows} == {
        "fedcross": ["55.00 ± 7.07", "–", "40.00 ± 14.14"],
        "adaptivefl": ["40.00", "35.00", "30.00"],
    }
    assert "0.4@2 keeps" in table.note
    plain = width_table(group_runs(load_runs([tmp_path / "fedcross1"]).runs)[0])
    assert plain is not None
    assert "@" not in plain.note
    alone = load_runs([tmp_path / "fedavg1"]).runs
    assert width_table(group_runs(alone)[0]) is None
