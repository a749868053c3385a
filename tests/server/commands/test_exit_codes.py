"""A run that did not do its work never exits with 0."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedcross.server.session import Session
from tests.support.command import main

ROOT = Path(__file__).parents[3]
SMALL = ["task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4", "clients_per_round=2"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1"]
#: Every client sends NaN, and the guard rejects that.
BAD = ["attack=not_finite", "attack.clients=4"]


def test_a_run_without_one_accepted_reply_fails_and_leaves_no_result(tmp_path, capsys):
    assert main([*SMALL, *BAD, "rounds=2", f"output={tmp_path / 'run'}"]) == 1
    assert "not one accepted reply (non_finite 4)" in capsys.readouterr().err
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_sweep_with_one_failed_run_fails(tmp_path, capsys):
    arguments = [*SMALL, *BAD, "rounds=1", "seed=1,2"]
    assert main(["-m", *arguments, f"hydra.sweep.dir={tmp_path}"]) == 1
    assert "not one accepted reply" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ZeroDivisionError("x"), None)])
def test_a_run_that_is_cut_off_fails(tmp_path, monkeypatch, error, code):
    def broken(session, number):
        raise error

    monkeypatch.setattr(Session, "_round", broken)
    arguments = [*SMALL, "rounds=1", f"output={tmp_path / 'run'}"]
    if code is None:  # an error of ours keeps its traceback, and Python exits with 1
        with pytest.raises(ZeroDivisionError):
            main(arguments)
    else:
        assert main(arguments) == code


@pytest.mark.parametrize(
    "command",
    ["export {}", "report {}", "audit {}", "onboard {}", "deploy sample {} porch", "deploy rotate-key {}", "resume={}",
     "resume={} log.format=json"],
)  # fmt: skip
def test_a_folder_of_somebody_else_is_told_in_a_line(tmp_path, monkeypatch, capsys, command):
    closed, stat = tmp_path / "closed" / "run", Path.stat

    def hidden(path, **how):
        if path == closed or closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", hidden)
    assert main([word.format(closed) for word in command.split()]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert str(closed) in told
    assert f"Permission denied, user {os.getuid()} has no right to it. Run as its owner, or change its mode." in told


def test_a_refusal_that_is_about_no_file_keeps_its_traceback(monkeypatch):
    def refused(arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("fedcross.server.commands.audit.main", refused)
    with pytest.raises(PermissionError):
        main(["audit", "run"])


@pytest.mark.slow
def test_a_run_whose_reader_is_gone_fails(tmp_path):
    command = shlex.join([sys.executable, "-m", "fedcross", *SMALL, "rounds=3", f"output={tmp_path / 'run'}"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 141, done.stderr[-2000:]


@pytest.mark.slow
def test_nothing_is_said_of_leaks_at_the_end():
    """torchvision brings Triton, whose bindings print 30 lines if its objects are still there when Python ends."""
    code = "import sys, torchvision; sys.argv = ['fedcross', '--version']"
    code += "; from fedcross.server.commands.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
