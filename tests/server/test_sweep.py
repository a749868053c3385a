"""Command lines and sweeps: what they expand to, and that nothing is run twice, lost or overwritten."""

import json

import pytest
from filelock import FileLock

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.command_line import checked_plan, read_plan
from fedcross.server.launch import launch
from fedcross.server.sweep import applicable, plan, progress, sweep_job
from tests.server.commands.test_run import SMALL, call

TINY = [*SMALL, "task=digits", "train.lr=0.1", "engine.workers=1"]


def results(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


# ---- what would run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_experiments_own_sweep_is_expanded_and_replaced_by_the_command_line():
    demo = plan([], ["experiment=demo", "method.alpha=0.8"])
    assert demo.multirun
    assert demo.jobs == [
        ["method=fedavg", "experiment=demo"],
        ["method=fedcross", "++method.alpha=0.8", "experiment=demo"],
    ]
    found = plan(["-m"], ["experiment=demo", "method=fedcross", "seed=1,2", "hydra.sweep.dir=here"])
    assert [job for job in found.jobs if "seed=2" in job] == [
        ["method=fedcross", "++method.alpha=0.9", "experiment=demo", "seed=2"]
    ]
    assert (len(found.jobs), found.folder.name) == (2, "here")


def test_a_setting_goes_to_the_choices_that_have_it():
    assert applicable(["partition=iid", "++partition.beta=0.1"]) == ["partition=iid"]
    both = ["partition=dirichlet", "++partition.beta=0.1"]
    assert applicable(both) == both
    assert plan(["-m"], ["partition=iid,dirichlet", "partition.bta=1"]).unused == ("partition.bta",)


def test_short_names_are_replaced_and_printed(capsys):
    typed = ["clients=8", "beta=0.1", "alpha=0.9", "lr=0.1", "epochs=1", "batch=5", "K=4"]
    found = read_plan(["-m", *typed, "seed=1,2"])
    full = ["++partition.clients=8", "++partition.beta=0.1", "++method.alpha=0.9", "train.lr=0.1", "train.epochs=1"]
    assert list(found.overrides) == [*full, "train.batch=5", "clients_per_round=4", "seed=1,2"]
    assert "lr is train.lr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["experiment=demo", "method.alpha=0.1,0.9"], "must be"),
        (["-m", "seed=1,2", "output=x"], "hydra.sweep.dir"),
        (["-m", "federation.deadline_s=5,6"], "share one folder"),
        (["--rounds=5"], "rounds=5"),
        (["rounds"], "NAME=VALUE"),
        (["=5"], "needs a name"),
        (["resume="], "no folder"),
        (["resume=nowhere"], "no such run folder"),
        (["output=~/x"], "does not know ~"),
        (["metod=fedavg"], "'method'"),
        (["method=fedav"], "'fedavg'"),
        (["method=fedavg", "alpha=0.9"], "no setting alpha"),
        (["report=x"], "fedcross report"),
    ],
)
def test_wrong_command_lines_are_refused_in_words(arguments, word):
    with pytest.raises(ConfigError) as caught:
        checked_plan(arguments)
    assert word in str(caught.value)


def test_all_faults_of_a_command_line_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        checked_plan(["metod=fedavg", "rounds=0", "train.lr=-1"])
    assert len(caught.value.faults) == 3


def test_settings_of_another_engine_are_left_out_when_a_run_is_resumed(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[engine=local, engine.workers=2, rounds=3]")
    found = read_plan([f"resume={tmp_path}", "engine=batched"])
    assert "engine.workers=2" not in found.overrides
    assert found.overrides[:2] == ("engine=local", "rounds=3")


# ---- once, and only once ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_done_is_skipped_and_what_is_longer_is_continued(monkeypatch, tmp_path, capsys):
    sweep = ["-m", *TINY, "method=fedavg,fedcross", "alpha=0.8,0.9", "hydra.sweep.dir=all"]
    assert call(monkeypatch, tmp_path, *sweep, "rounds=1") == 0
    assert len(results(tmp_path / "all")) == 3  # FedAvg has no alpha: its two jobs are one run
    assert capsys.readouterr().out.count("Already finished, 1 round:") == 1
    before = {path: path.read_bytes() for path in (tmp_path / "all").rglob("*.safetensors")}
    assert call(monkeypatch, tmp_path, *sweep, "rounds=1") == 0
    assert capsys.readouterr().out.count("Already finished, 1 round:") == 4
    assert {path: path.read_bytes() for path in before} == before
    assert call(monkeypatch, tmp_path, "-m", *TINY, "method=fedavg", "seed=1", "hydra.sweep.dir=all", "rounds=2") == 0
    assert capsys.readouterr().out.count("Continued after round 1") == 1
    rounds = sorted((r["method"], r["rounds"]) for r in results(tmp_path / "all").values())
    assert rounds == [("fedavg", 2), ("fedcross", 1), ("fedcross", 1)]


@pytest.mark.slow
def test_another_configuration_is_never_overwritten(tmp_path):
    folder, job = tmp_path / "one", [*TINY, "method=fedcross", "clients_per_round=2", "rounds=1"]
    sweep_job(job, folder)
    kept = (folder / "result.json").read_bytes()
    with pytest.raises(ConfigError, match=r"another configuration is here \(seed 1, now 2"):
        sweep_job([*job, "seed=2"], folder)
    for path in (folder / "checkpoints").iterdir():  # then the record says it
        path.unlink()
    assert progress(folder, load(job)) == (1, True)
    with pytest.raises(ConfigError, match="another configuration"):
        sweep_job([*job, "train.lr=0.2"], folder)
    assert (folder / "result.json").read_bytes() == kept


@pytest.mark.slow
def test_a_run_that_was_continued_with_another_k_is_no_job_of_the_sweep(tmp_path):
    folder, job = tmp_path / "one", [*TINY, "method=fedcross", "clients_per_round=2"]
    sweep_job([*job, "rounds=1"], folder)
    launch([*job, "rounds=2", f"resume={folder}", "clients_per_round=3"], folder)
    with pytest.raises(ConfigError, match="clients_per_round 3, now 2"):
        sweep_job([*job, "rounds=3"], folder)


def test_a_job_that_runs_elsewhere_is_left_alone(tmp_path, capsys):
    with FileLock(tmp_path / ".lock"):
        sweep_job([*TINY, "rounds=1"], tmp_path)
    assert "Already running in another process" in capsys.readouterr().out
    assert not (tmp_path / "metrics.jsonl").exists()


# ---- other launchers and sweepers ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_study_over_two_settings_ends_with_the_best(monkeypatch, tmp_path, capsys):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    study = [
        "-m",
        "hydra/sweeper=optuna",
        *TINY,
        "rounds=1",
        "task.validation=0.3",
        "alpha=interval(0.8,0.99)",
        "lr=tag(log,interval(0.001,0.5))",
    ]
    assert call(monkeypatch, tmp_path, *study, "hydra.sweeper.n_trials=3", "hydra.sweep.dir=all") == 0
    found = results(tmp_path / "all").values()
    accuracies = [one["validation_accuracy"] for one in found]
    assert len(accuracies) == 3
    assert accuracies != [one["final_accuracy"] for one in found]
    out = capsys.readouterr().out
    assert "Best of the study: method.alpha=" in out
    assert f"accuracy {max(accuracies):.4f}" in out


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_parallel_launchers_compose(launcher):
    found = checked_plan(["-m", f"hydra/launcher={launcher}", "seed=1,2", "method=fedavg"])
    assert len(found.jobs) == 2
