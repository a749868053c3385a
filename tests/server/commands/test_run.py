import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from fedcross.core.errors import ConfigError
from fedcross.core.paths import import_root
from fedcross.server.check import checked_plan, read_plan
from fedcross.server.commands.main import main
from fedcross.server.sweep import applicable
from tests.support import warm

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


def test_a_run_from_the_command_line(monkeypatch, tmp_path):
    assert call(monkeypatch, tmp_path, *SMALL, "rounds=2", "hydra.run.dir=one") == 0
    assert json.loads((tmp_path / "one" / "result.json").read_text())["rounds"] == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["method=fedavg,fedcross", "--cfg", "job"], "of one run"),
        (["-m", "method=fedavg", "--cfg", "job"], "of one run"),
        (["method=nix", "--cfg", "job"], "nix"),
        (["method=[", "-c", "job"], "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_shown_is_one_line_and_no_traceback(
    monkeypatch, tmp_path, capsys, arguments, told
):
    assert call(monkeypatch, tmp_path, *arguments) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_sweep_gives_each_method_the_settings_it_has(monkeypatch, tmp_path):
    sweep = ["-m", "method=fedavg,fedcross", "method.alpha=0.8", "seed=1,2", "rounds=1", "hydra.sweep.dir=all"]
    assert call(monkeypatch, tmp_path, *SMALL, *sweep) == 0
    results = [json.loads(path.read_text()) for path in (tmp_path / "all").rglob("result.json")]
    assert sorted((r["method"], r["seed"]) for r in results) == [
        ("fedavg", 1), ("fedavg", 2), ("fedcross", 1), ("fedcross", 2),
    ]  # fmt: skip


@pytest.mark.slow
def test_resume_continues_with_the_runs_own_settings(monkeypatch, tmp_path):
    assert call(monkeypatch, tmp_path, *SMALL, "method=fedavg", "rounds=1", "hydra.run.dir=one") == 0
    assert call(monkeypatch, tmp_path, "resume=one", "rounds=3") == 0
    result = json.loads((tmp_path / "one" / "result.json").read_text())
    assert (result["method"], result["rounds"]) == ("fedavg", 3)


@pytest.mark.slow
def test_resume_on_another_engine_leaves_out_what_that_one_lacks(monkeypatch, tmp_path):
    small = [*SMALL, "method=fedavg", "engine=local", "engine.workers=1"]
    assert call(monkeypatch, tmp_path, *small, "rounds=1", "hydra.run.dir=one") == 0
    assert call(monkeypatch, tmp_path, "resume=one", "rounds=2", "engine=batched") == 0
    result = json.loads((tmp_path / "one" / "result.json").read_text())
    assert (result["engine"], result["rounds"]) == ("batched", 2)


@pytest.mark.slow
def test_a_run_ends_at_a_round_that_it_has_and_that_was_evaluated(monkeypatch, tmp_path, capsys):
    """Else its last accuracy would be of an older model, or its settings would name other rounds than it has."""
    small = [*SMALL, "method=fedavg", "evaluate_every=2", "rounds=9", "checkpoint.every=1"]
    assert call(monkeypatch, tmp_path, *small, "stop_at=3", "hydra.run.dir=one") == 0
    assert call(monkeypatch, tmp_path, "resume=one", "rounds=2") == 2
    assert "rounds=2: the run in that folder has 3 already. Give 3 or more." in capsys.readouterr().err
    assert call(monkeypatch, tmp_path, "resume=one", "rounds=3") == 2
    assert "rounds=3: that round was not evaluated, for evaluate_every=2." in capsys.readouterr().err
    assert "rounds: 9" in (tmp_path / "one" / ".hydra" / "config.yaml").read_text()
    assert call(monkeypatch, tmp_path, "resume=one", "stop_at=4") == 0
    assert call(monkeypatch, tmp_path, "resume=one", "rounds=4") == 0
    assert json.loads((tmp_path / "one" / "result.json").read_text())["rounds"] == 4


def test_a_job_of_an_experiment_that_is_a_sweep_goes_on_alone(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[experiment=demo, method=fedavg, seed=2]")
    found = read_plan([f"resume={tmp_path}", "rounds=9"])
    assert not found.multirun
    assert [{"method=fedavg", "seed=2", "rounds=9"} <= set(job) for job in found.jobs] == [True]
    assert read_plan(["-m", f"resume={tmp_path}"]).multirun


def test_a_client_without_samples_is_named(monkeypatch, tmp_path, capsys):
    owners = tmp_path / "owners.json"
    owners.write_text(json.dumps([[0, 1, 2], [], [3, 4]]))
    code = call(
        monkeypatch, tmp_path, "partition=indices", f"partition.file={owners}", "clients_per_round=2", "rounds=1"
    )
    assert code == 2
    assert "client 1" in capsys.readouterr().err


def test_settings_for_other_methods_are_dropped_in_a_sweep_only():
    assert applicable(["method=fedavg", "++method.alpha=0.9"]) == ["method=fedavg"]
    assert applicable(["method=fedcross", "++method.alpha=0.9"]) == ["method=fedcross", "++method.alpha=0.9"]
    with pytest.raises(ConfigError):
        checked_plan(["method=fedavg", "method.alpha=0.9"])


def environment(tmp_path):
    return {**os.environ, "PYTHONPATH": str(import_root()), "FLWR_HOME": str(tmp_path)}


@pytest.mark.slow
def test_help_imports_neither_torch_nor_ray(tmp_path):
    program = (
        "import sys; sys.argv = ['fedcross', '--help']\n"
        "from fedcross.server.commands.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'flwr', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "method" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_the_rounds_and_say_how_to_go_on(tmp_path, number, ends):
    said = tmp_path / "said"
    with said.open("w") as file:
        process = warm.Process(
            ["-m", "fedcross", *SMALL, "rounds=100000", "serve.page=true", "hydra.run.dir=one"],
            cwd=tmp_path, env=environment(tmp_path), stderr=file,
        )  # fmt: skip
    metrics = tmp_path / "one" / "metrics.jsonl"
    waiting_until = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < waiting_until
        assert process.poll() is None
        time.sleep(0.05)
    assert (tmp_path / "one" / "page.url").exists()
    process.send_signal(number)
    try:
        code = process.wait(timeout=600)
    finally:
        process.kill()  # else a run that Ctrl-C does not end would go on for ever
    told = said.read_text()
    assert code == ends
    assert "resume=" in told
    assert not (tmp_path / "one" / "page.url").exists()
    assert "Traceback" not in told
    assert all(json.loads(text) for text in metrics.read_text().splitlines())


def test_version_and_help_are_of_fedcross(capsys):
    assert main(["--version"]) == 0
    assert re.match(r"fedcross \d+\.\d+\.\d+, flwr ", capsys.readouterr().out)
