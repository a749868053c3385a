"""The report command, end to end on made-up run folders."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import subcommand
from tests.support.fake import config, write_run

main = subcommand("report")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "multirun"
    for seed in (1, 2):
        write_run(folder / f"a{seed}", [0.1 * seed, 0.30, 0.50], config("fedavg", seed, 3))
        write_run(folder / f"x{seed}", [0.20, 0.40, 0.60 + 0.1 * seed], config("fedcross", seed, 3))
    return folder


@pytest.mark.slow
def test_writes_every_file_and_the_means_over_seeds(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert main([str(sweep), "--out", str(out), "--target", "0.35", "--x", "bytes"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == (out / "report.md").read_text().strip()
    rows = {row["method"]: row for row in csv.DictReader((out / "report.csv").read_text().splitlines())}
    # FedCross ends at 0.70 and 0.80: mean 75, sample standard deviation 10 / sqrt(2) = 7.07107.
    assert float(rows["fedcross"]["final_mean"]) == 75.0
    assert float(rows["fedcross"]["final_std"]) == pytest.approx(7.07107)
    assert rows["fedavg"]["seeds"] == "2"
    assert float(rows["fedavg"]["bytes_mean"]) == 4.5e6  # three rounds of 1.0 MB down and 0.5 MB up
    assert "75.00 ± 7.07" in printed
    # FedAvg passes 0.35 in round 3 (6 s), FedCross in round 2 (4 s).
    assert "| 35 %   | fedcross | 2 of 2  | 2 ± 0  | 3.0 MB | 4.0 s |" in printed
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_unfinished_and_damaged_runs_are_named(sweep: Path, capsys: pytest.CaptureFixture[str]):
    cut = write_run(sweep / "cut", [0.2, 0.3], config("moon", 1, 3), finished=False)
    bad = write_run(sweep / "bad", [0.2, 0.3, 0.4], config("moon", 2, 3))
    (bad / "metrics.jsonl").write_text('{"round": 1, "test_acc\n{"round": 2, "test_accuracy": 0.3}\n')
    assert main([str(sweep)]) == 0
    printed = capsys.readouterr().out
    assert f"left out {cut}: unfinished, 2 of 3 rounds" in printed
    assert f"left out {bad}: metrics.jsonl is damaged in line 1" in printed
    assert "| moon" not in printed
    assert main([str(sweep), "--unfinished"]) == 0
    assert "2 of 3" in capsys.readouterr().out.split("## Notes")[0]


@pytest.mark.slow
def test_every_table_says_in_how_many_runs_the_defence_was_on_and_what_it_did(tmp_path: Path):
    """Two runs of two rounds: 3, 1, 3, 1 uploads clipped are 2 a round; in one of the four 2 are quarantined."""
    defended = [
        write_run(tmp_path / "in" / f"a{seed}", [0.2, 0.3], {**config("fedavg", seed, 2), "defence": {"enabled": True}})
        for seed in (1, 2)
    ]
    for number, folder in enumerate(defended):
        first, second = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        first |= {"clipped": 3, "lightened": 1, "rejected": {"quarantined": 2} if number else {}}
        second |= {"clipped": 1, "lightened": 0}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    said = "uploads clipped, 0.5 lightened, 0.5 quarantined per round of these."
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "all"), "--no-html"]) == 0
    tables = (tmp_path / "all" / "report.md").read_text().split("\n## ")[1:]
    assert all(f"Defence on in 2 of 2 runs: 2 {said}" in table for table in tables)
    (row,) = csv.DictReader((tmp_path / "all" / "report.csv").read_text().splitlines())
    assert row["defence"] == f"Defence on in 2 of 2 runs: 2 {said}"
    write_run(tmp_path / "in" / "plain", [0.2, 0.3], config("fedcross", 1, 2))
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "more"), "--no-html"]) == 0
    assert f"Defence on in 2 of 3 runs: 2 {said}" in (tmp_path / "more" / "report.md").read_text()
    rows = csv.DictReader((tmp_path / "more" / "report.csv").read_text().splitlines())
    assert {row["method"].split()[0]: bool(row["defence"]) for row in rows} == {"fedavg": True, "fedcross": False}


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_without_runs_is_wrong_use(tmp_path: Path, make: bool, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "empty"
    if make:
        folder.mkdir()
    assert main([str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_wrong_use(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert main([str(sweep), "--out", str(tmp_path / "file")]) == 2
    assert "Choose another folder" in capsys.readouterr().err


def test_a_target_in_percent_is_explained(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["x", "--target", "50"])
    assert stopped.value.code == 2
    assert "write 50 % as 0.5" in capsys.readouterr().err


def test_help_imports_no_plotting_library():
    code = (
        "import sys\nfrom fedcross.server.commands.report import parser\nparser().format_help()\n"
        "print(sorted({'torch', 'matplotlib', 'plotly', 'scipy', 'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_accuracy_of_single_rounds(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "in" / "a", [0.2, 0.3], config("fedavg", 1, 2))
    write_run(tmp_path / "in" / "b", [0.4, 0.5], config("fedavg", 2, 2))
    assert main([str(tmp_path / "in"), "--no-html", "--at", "1", "7"]) == 0
    rows = [row.split("|") for row in capsys.readouterr().out.splitlines() if "round 1" in row or "30.00 ±" in row]
    # Rounds 1 and 7: .2 and .4 make 30 with a standard deviation of 14.14; there is no round 7.
    assert [[cell.strip() for cell in row[1:-1]] for row in rows] == [
        ["method", "round 1 %", "round 7 %", "seeds"],
        ["fedavg", "30.00 ± 14.14", "–", "2"],
    ]
    assert main([str(sweep), "--no-html"]) == 0
    assert "After a round" not in capsys.readouterr().out


@pytest.mark.slow
def test_runs_of_different_length_at_equal_rounds(sweep: Path, capsys: pytest.CaptureFixture[str]):
    write_run(sweep / "long", [0.25, 0.35, 0.9, 0.9], config("moon", 1, 4))
    assert main([str(sweep), "--until", "2"]) == 0
    printed = capsys.readouterr().out
    assert "| moon     | 35.00" in printed
    assert "90.00" not in printed
    assert "rounds=" not in printed
    assert "only rounds up to 2 count (--until)" in printed
    with pytest.raises(SystemExit):
        main([str(sweep), "--until", "0"])
    assert main([str(sweep / "long"), "--every", "3", "--no-html"]) == 0
    printed = capsys.readouterr().out
    assert "| moon   | 90.00   | 90.00  | 90.00" in printed
    assert "only evaluations in rounds that 3 divides count (--every), in every table" in printed
    assert main([str(sweep / "long"), "--every", "1", "--no-html"]) == 0
    assert "| moon   | 90.00   | 90.00  | 60.00" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(sweep), "--every", "0"])
    assert "rounds count from 1" in capsys.readouterr().err
