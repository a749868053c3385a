"""What a run says when it starts and when it is interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedcross
from fedcross.conf.compose import compose
from fedcross.conf.schema import load
from fedcross.server import check
from fedcross.server.launch import RunInterrupted
from fedcross.server.opening import describe, place, read
from tests.support.command import main

SMALL = ["task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4", "clients_per_round=2"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1", "method=fedavg", "rounds=2", "device=cpu"]


def test_a_run_says_what_runs_where_and_on_what_once_and_in_plain_text(tmp_path, capsys):
    folder = tmp_path / "my run"
    assert main([*SMALL, f"output='{folder}'", "defence.enabled=true"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == "fedavg on digits, 4 clients (iid), K=2 a round, 2 rounds, model mlp, seed 1"
    assert second == "engine local (1 worker), defence on, only 200 training examples"
    assert rest[:2] == ["Reading digits ...", "200 training examples over 4 clients, 50 test examples, 10 classes"]
    assert rest[2] == f"device cpu, folder {folder}"
    assert [line.split("  ")[1] for line in rest[3:-2]] == ["round 1/2", "round 2/2"]
    assert rest[-2].startswith("Finished: 2 rounds, accuracy ")
    assert rest[-1] == f"folder {folder}. Next: fedcross report '{folder}'"
    assert len(set(rest)) == len(rest)
    assert "\x1b" not in "".join(rest)


def test_what_no_method_has_by_itself_is_named():
    chosen = ["compression.up=int8", "privacy.enabled=true", "attack=scaling", "partition=natural"]
    text = describe(compose(chosen))
    assert "clients as the data have them (natural)" in text
    assert "attack scaling, compression up int8, privacy on" in text
    sized = compose(["method=fedcross_three_sizes", "devices=three_sizes"])
    assert "models of width 1.0 / 0.66 / 0.4 on devices three_sizes" in describe(sized)
    assert "width" not in describe(compose(["method=fedcross"]))


@pytest.mark.parametrize("setting", ["rounds=-1", "train.lr=-1", "task=cifar10"])
def test_a_refused_run_names_no_folder(tmp_path, capsys, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "data_root=nowhere", setting]) == 2
    assert "folder" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpu", "device", "told"), [
    (False, "auto", "auto (cpu)"), (True, "auto", "auto (cuda:0)"), (False, "cpu", "cpu"),
])  # fmt: skip
def test_the_device_that_is_taken_is_said(monkeypatch, gpu, device, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    folder = Path("/x/my run")
    assert place(load([f"device={device}"]), folder) == f"device {told}, folder {folder}"
    assert place(load([f"device={device}", "resume=/"]), folder) == f"device {told}, continues {folder}"
    remote = ["engine=remote", "engine.address=fl:8000", "engine.authority=ca.crt"]
    assert place(load([f"device={device}", *remote]), folder) == f"device {device}, folder {folder}"
    monkeypatch.setenv("FEDCROSS_DEVICE", "cpu")
    assert place(load(["device=auto"]), folder).startswith("device auto (cpu), ")


def test_one_round_is_a_round_and_a_log_for_programs_has_no_line_for_people(tmp_path, capsys):
    once = [*SMALL, "rounds=1"]
    assert main([*once, f"output={tmp_path / 'a'}"]) == 0
    told = capsys.readouterr().out
    assert ", 1 round, model mlp" in told
    assert "\nFinished: 1 round, accuracy " in told
    assert main([*once, f"output={tmp_path / 'b'}", "log.format=json"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert [json.loads(line)["event"] for line in said.err.splitlines()][-1] == "run_finished"


def test_a_sweep_ends_with_its_folder_and_what_to_do_next(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedcross"])
    assert main(["-m", *SMALL, "rounds=1", "seed=1,2"]) == 0
    (folder,) = tmp_path.glob("multirun/*/*")
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == f"folder {folder}. Next: fedcross report {folder}"
    assert told.count("Next: ") == 1


def test_a_sweep_has_the_folder_of_the_second_in_which_it_was_read(tmp_path, capsys, monkeypatch):
    """Hydra looks at the clock too; in the next second its folder was another one, and the last line was missing."""
    read = check.read_plan

    def a_second_before(arguments: list[str]) -> check.Plan:
        return replace(read(arguments), folder=tmp_path / "read at 08-04-52")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedcross"])
    monkeypatch.setattr(check, "read_plan", a_second_before)
    assert main(["-m", *SMALL, "rounds=1", "seed=1,2"]) == 0
    folder = tmp_path / "read at 08-04-52"
    assert capsys.readouterr().out.splitlines()[-1] == f"folder {folder}. Next: fedcross report '{folder}'"
    assert len(list(folder.glob("*/result.json"))) == 2


@pytest.mark.slow
def test_it_is_said_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from fedcross.server import jobs, opening, check\n"
        "check.check_job = lambda overrides: print('torch' in sys.modules) or sys.exit(0)\n"
        "jobs.single(['method=fedavg', 'output=run'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    first, _, torch = done.stdout.splitlines()
    assert first.startswith("fedavg on digits")
    assert torch == "False"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("run", "{0}/run"), ("my run", "\"'{0}/my run'\""), ("it's", "'...'")],
    ids=["plain", "space", "quote"],
)
def test_an_interrupt_names_the_folder_and_the_command(tmp_path, name, shown, monkeypatch):
    stop = RunInterrupted(tmp_path / name)
    assert "start again" in stop.advice()
    monkeypatch.setattr("fedcross.server.launch.rounds_in", lambda folder: 7)
    told = stop.advice()
    assert told.startswith("Interrupted after round 7. Continue it with: fedcross resume=")
    if name != "it's":
        assert told.endswith(shown.format(tmp_path))


def test_the_package_knows_its_version():
    assert fedcross.__version__.count(".") == 2


def test_devices_with_data_of_their_own_have_no_number_of_examples(capsys):
    task = SimpleNamespace(train=[], test=[0] * 5, classes=10)
    data = SimpleNamespace(task=task, partition=SimpleNamespace(own=True))
    read(SimpleNamespace(names={"task": "arrays"}, load_data=lambda: data))
    assert capsys.readouterr().out.splitlines()[1] == "training examples on the devices, 5 test examples, 10 classes"


def test_local_accuracies_that_no_client_can_measure_are_said_or_refused_before_there_is_a_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    skewed = [*SMALL, "partition=dirichlet", "partition.clients=4", "rounds=1", f"output='{folder}'"]
    assert main([*skewed, "evaluate_clients=true"]) == 2
    told = "partition=dirichlet gives clients no test examples"
    assert f"evaluate_clients=true: {told}. Turn it off" in capsys.readouterr().err
    assert not folder.exists()
    assert main([*skewed, "evaluate_local=true"]) == 0
    assert capsys.readouterr().err.count(f"Note: evaluate_local=true: {told}, so no local accuracy is measured.") == 1
