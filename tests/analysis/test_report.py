"""A report of made-up runs: files, title, summary, and the page."""

import json
import re

import pandas as pd
import pytest

from fedcross.analysis.report import write_report
from fedcross.core.errors import DataError
from tests.support.command import subcommand
from tests.support.fake import config, write_run

main = subcommand("report")


@pytest.fixture
def runs(tmp_path):
    for method, seed, last in (("fedavg", 1, 0.5), ("fedavg", 2, 0.52), ("fedcross", 1, 0.6), ("fedcross", 2, 0.66)):
        write_run(tmp_path / "runs" / f"{method}{seed}", [0.1, 0.3, last], config(method, seed, 3))
    return tmp_path / "runs"


def test_a_report_has_a_title_a_date_and_one_sentence(runs, tmp_path):
    text = write_report([runs], tmp_path / "out", at=[2])
    title, day, summary = text.split("\n\n")[:3]
    assert title == "# FedCross report: cifar10, cnn, dirichlet beta=1.0"
    assert re.fullmatch(r"\d\d \w+ \d{4}", day)
    assert "FedCross reaches" in summary
    assert "above FedAvg" in summary
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.md", "report.csv", "report.tex", "report.html", "curves.png"}
    assert "round 2 %" in text


def test_the_csv_has_plain_numbers(runs, tmp_path):
    write_report([runs], tmp_path / "out", html=False)
    table = pd.read_csv(tmp_path / "out" / "report.csv").set_index("method")
    assert table.loc["fedcross", "final_mean"] == pytest.approx(63)
    assert table.loc["fedavg", "bytes_mean"] == 4_500_000


def test_the_page_is_self_contained(runs, tmp_path):
    write_report([runs], tmp_path / "out", x="bytes")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', page)
    assert page.count("<table") >= 4
    assert "fedcross" in page


def test_the_command_names_what_is_wrong(tmp_path, runs, capsys):
    assert main([str(runs), "--out", str(tmp_path / "out"), "--until", "2", "--every", "2"]) == 0
    assert "only rounds up to 2" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(DataError):
        write_report([tmp_path / "none"], tmp_path / "out")


def test_a_report_shows_what_a_hospital_asks_for(runs, tmp_path):
    path = runs / "fedcross1" / "result.json"
    more = {
        "client_names": ["North", "South"],
        "client_accuracy": {"0": 0.75, "1": 0.5},
        "client_accuracy_worst_tenth": 0.5,
        "metrics": {"balanced_accuracy": 0.625, "majority_share": 0.7},
        "privacy": {"epsilon": 2.0, "meaning": "Privacy: epsilon 2."},
        "stopped": {"reason": "target", "meaning": "Stopped early: enough."},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    text = write_report([runs], tmp_path / "out", html=False)
    assert re.search(r"\| North +\| 75\.00 +\|", text)
    assert re.search(r"\| fedcross \| 62\.50 +\| 70\.00 +\| 50\.00 +\|", text)
    assert "fedcross, seed 1: Privacy: epsilon 2." in text
    assert "Stopped early: enough." in text


def test_a_run_that_stopped_early_is_finished(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, [0.1, 0.3], config("fedavg", 1, 9))
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stopped": {"reason": "patience"}}))
    assert "1 run" in write_report([folder], tmp_path / "out", html=False)
