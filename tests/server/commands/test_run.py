"""The fedcross command: runs, help, errors, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import pytest

from fedcross.server.command_line import SUBCOMMANDS
from fedcross.server.commands.main import help_text, main

SMALL = [
    "task.limit=200",
    "partition=iid",
    "partition.clients=6",
    "clients_per_round=3",
    "train.epochs=1",
    "logger=none",
]


def call(monkeypatch, tmp_path, *arguments):
    """Run the command in this process and return its exit code (0 if it just returned)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedcross", *arguments])
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def test_a_run_says_what_it_does_and_what_to_do_next(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, tmp_path, *SMALL, "rounds=2", "engine.workers=1", "lr=0.1", "hydra.run.dir=one") == 0
    assert json.loads((tmp_path / "one" / "result.json").read_text())["rounds"] == 2
    out = capsys.readouterr().out
    for word in ("lr is train.lr", "fedcross on digits", "6 clients (iid)", "Finished: 2 rounds", "fedcross report"):
        assert word in out


def test_events_as_json(monkeypatch, tmp_path, capsys):
    assert (
        call(monkeypatch, tmp_path, *SMALL, "rounds=1", "engine.workers=1", "log.format=json", "hydra.run.dir=one") == 0
    )
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    wanted = ["run_started", "round_started", "round_finished", "checkpoint_written", "run_finished"]
    assert [event for event in events if event in wanted] == wanted
    assert {"request_sent", "reply_accepted"} <= set(events)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["method=fedavg,fedcross", "--cfg", "job"], "of one run"),
        (["method=nix", "--cfg", "job"], "nix"),
        (["rounds=0", "train.lr=0"], "2 errors"),
        (["experiment"], "no such subcommand"),
        (["report", "nowhere"], "nowhere"),
        (["export", "nowhere"], "no such run folder"),
        (["nix=1", "--cfg", "job"], "nix"),
    ],
)
def test_wrong_use_is_told_in_words_with_exit_code_2(monkeypatch, tmp_path, capsys, arguments, told):
    assert call(monkeypatch, tmp_path, *arguments) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_help_names_groups_and_fits_the_terminal(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, tmp_path, "--help") == 0
    assert "method: adaptivefl" in capsys.readouterr().out
    assert max(map(len, help_text(80).splitlines())) <= 80
    for name in SUBCOMMANDS:
        assert name in help_text()


def test_help_behind_settings_starts_no_run(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, tmp_path, "method=fedavg", "task=digits", "--help") == 0
    assert "method: adaptivefl" in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists()


def test_help_imports_neither_torch_nor_hydra():
    code = "import sys; from fedcross.server.commands.main import main; main(['--help'])"
    code += "; print({'torch', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_that_says_how_to_go_on(tmp_path, number, code):
    command = [sys.executable, "-m", "fedcross", *SMALL, "engine.workers=1", "rounds=500", "output=one"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, until = tmp_path / "one" / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == code
    assert "fedcross resume=" in err
