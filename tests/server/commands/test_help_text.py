"""``fedcross --help`` in narrow terminals, and where its pages are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcross.core import paths
from fedcross.server.commands import help_text, run
from tests.conftest import ROOT
from tests.support.command import main

LIST = "experiment/x: " + ", ".join(f"number_{number}" for number in range(30))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_of_the_help_is_wider_than_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.argv", ["fedcross"])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    path = str(ROOT / "docs")
    assert [one for one in said.splitlines() if len(one) > columns and path not in one] == []
    for word in ("fedcross_three_sizes", "== Groups: GROUP=NAME ==", "new-method", "seed [1]"):
        assert word in said
    assert f"{path}/reference/settings.md" in said


def test_a_list_goes_on_indented_and_a_tables_text_below_its_beginning():
    first, *rest = help_text.fitted(LIST, 60).splitlines()
    assert all(line.startswith("    number_") and len(line) <= 60 for line in rest)
    assert " ".join([first, *(line.strip() for line in rest)]) == LIST
    table = "seed [1]        decides every draw: the same configuration and seed give the same model"
    assert help_text.fitted(table, 50).splitlines()[1].startswith(" " * 16 + "configuration")


def test_pages_are_named_by_where_they_are(monkeypatch, tmp_path):
    assert Path(paths.page("reference/faults.md")).is_file()
    monkeypatch.setattr(paths, "import_root", lambda: tmp_path)  # a wheel has no pages
    assert paths.page("reference/faults.md") == "docs/reference/faults.md in fedcross's source"


def test_only_the_help_is_made_to_fit():
    assert run.HELP < run.SHOWING


@pytest.mark.parametrize(("command", "setting"), [("analyse", "snapshots.rounds="), ("audit", "log.audit=true")])
def test_the_help_says_what_a_run_needs_for_a_command(command, setting, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert setting in capsys.readouterr().out
