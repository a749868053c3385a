"""Sweeps: what a command line expands to, and that nothing is run twice, lost or overwritten."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock

from fedcross.analysis.groups import group_runs
from fedcross.analysis.loading import load_runs
from fedcross.analysis.tables import accuracy_table
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, FederationError
from fedcross.server.check import checked_plan
from fedcross.server.identity import fingerprint
from fedcross.server.jobs import standing, sweep_job
from fedcross.server.launch import launch
from fedcross.server.run_folder import LOCK, SERVER_LOCK
from fedcross.server.sweep import applicable, plan
from tests.server.commands.test_run import SMALL, call, environment
from tests.support import warm

#: Composes many configurations or trains several federations.
pytestmark = pytest.mark.slow

TINY = [*SMALL, "train.lr=0.1", "engine.workers=1"]


def results(folder: Path) -> dict[str, dict[str, object]]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


def table(folder: Path) -> list[list[str]]:
    """Return the report's accuracy table without the seconds, which are never the same twice."""
    found = accuracy_table(group_runs(load_runs([folder]).runs)[0])
    keep = [i for i, name in enumerate(found.header) if "econds" not in name and "time" not in name.lower()]
    return [[row[i] for i in keep] for row in (list(found.header), *map(list, found.rows))]


# ---- what would run ----------------------------------------------------------------------------------------------


def test_one_run_is_one_job():
    found = plan([], ["method=fedavg", "seed=3"])
    assert (found.multirun, found.jobs) == (False, [["method=fedavg", "seed=3"]])


def test_an_experiments_own_sweep_is_expanded():
    found = plan([], ["experiment=demo", "method.alpha=0.8"])
    assert found.multirun
    assert found.jobs == [
        ["method=fedavg", "experiment=demo"],
        ["method=fedcross", "++method.alpha=0.8", "experiment=demo"],
    ]


def test_the_command_line_replaces_what_the_experiment_sweeps():
    found = plan(["-m"], ["experiment=demo", "method=fedcross", "seed=1,2", "hydra.sweep.dir=here"])
    assert [job for job in found.jobs if "seed=2" in job] == [
        ["method=fedcross", "++method.alpha=0.9", "experiment=demo", "seed=2"]
    ]
    assert len(found.jobs) == 2
    assert found.folder == Path("here")


def test_a_setting_goes_to_the_choices_that_have_it():
    assert applicable(["partition=iid", "++partition.beta=0.1"]) == ["partition=iid"]
    both = ["partition=dirichlet", "++partition.beta=0.1"]
    assert applicable(both) == both
    assert plan(["-m"], ["partition=iid,dirichlet", "partition.bta=1"]).unused == ("partition.bta",)


def test_every_job_of_an_experiment_is_checked_beforehand():
    with pytest.raises(ConfigError, match="must be"):
        checked_plan(["experiment=demo", "method.alpha=0.1,0.9"])


def test_the_record_of_each_replay_is_read_beforehand(tmp_path):
    """Also where its place depends on the seed."""
    line = '{{"visit": {0}, "slot": 0, "client": 0, "start": {0}.0, "finish": {0}.5, "accepted": true}}\n'
    for seed in (2, 3):
        (tmp_path / f"{seed}.jsonl").write_text("".join(line.format(visit) for visit in range(2 * seed)))
    sweep = ["-m", "method=fedasync,fedbuff", "clock=replay", "clients_per_round=2", "rounds=2"]
    checked_plan([*sweep, "seed=2,3", f"clock.events={tmp_path}/${{seed}}.jsonl"])
    with pytest.raises(ConfigError, match=r"4\.jsonl: not a readable visits\.jsonl"):
        checked_plan([*sweep, "seed=2,4", f"clock.events={tmp_path}/${{seed}}.jsonl"])
    with pytest.raises(ConfigError, match=r"3\.jsonl: 6 visits are in it, and 4 rounds") as told:
        checked_plan([*sweep[:-1], "rounds=4", "seed=2,3", f"clock.events={tmp_path}/3.jsonl"])
    assert len(told.value.faults) == 1


@pytest.mark.parametrize("name", ["output", "resume"])
def test_a_sweep_has_no_single_folder(name, tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[]")
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir"):
        checked_plan(["-m", "seed=1,2", f"{name}={tmp_path}"])


# ---- which folder --------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_what_is_computed():
    same = ["rounds=7", "engine=ray", "logger=none", "device=cpu", "data_root=elsewhere", "checkpoint.every=3"]
    mark = fingerprint(load([]))
    assert all(fingerprint(load([override])) == mark for override in same)
    other = ["seed=2", "method.alpha=0.9", "method=fedavg", "train.lr=0.1", "partition.beta=0.1", "evaluate_every=2"]
    assert len({mark, *(fingerprint(load([override])) for override in other)}) == 1 + len(other)


# ---- once, and only once -------------------------------------------------------------------------------------------


def test_what_is_done_is_skipped_and_what_is_longer_is_continued(monkeypatch, tmp_path, capsys):
    sweep = ["-m", *TINY, "method=fedavg,fedcross", "method.alpha=0.8,0.9", "hydra.sweep.dir=all"]
    assert call(monkeypatch, tmp_path, *sweep, "rounds=1") == 0
    # FedAvg has no alpha: its two jobs are one run.
    assert len(results(tmp_path / "all")) == 3
    assert capsys.readouterr().err.count("Already finished, 1 round:") == 1
    before = {
        path: path.read_bytes() for path in (tmp_path / "all").rglob("*") if path.is_file() and "seed" in str(path)
    }
    before = {
        path: data for path, data in before.items() if path.suffix != ".log" and path.name not in (LOCK, SERVER_LOCK)
    }
    assert call(monkeypatch, tmp_path, *sweep, "rounds=1") == 0
    assert capsys.readouterr().err.count("Already finished, 1 round:") == 4
    assert {path: path.read_bytes() for path in before} == before
    longer = ["-m", *TINY, "method=fedavg", "seed=1", "hydra.sweep.dir=all", "rounds=2"]
    assert call(monkeypatch, tmp_path, *longer) == 0
    assert capsys.readouterr().err.count("Continued after round 1") == 1
    rounds = sorted((r["method"], r["rounds"]) for r in results(tmp_path / "all").values())
    assert rounds == [("fedavg", 2), ("fedcross", 1), ("fedcross", 1)]


def test_another_configuration_is_never_overwritten(tmp_path):
    folder = tmp_path / "one"
    sweep_job([*TINY, "method=fedavg", "rounds=1"], folder)
    kept = (folder / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="another configuration") as caught:
        sweep_job([*TINY, "method=fedavg", "rounds=1", "seed=2"], folder)
    assert any(fault.startswith("seed:") for fault in caught.value.faults)
    # The same without checkpoints: the record says what it was.
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    assert standing(folder, load([*TINY, "method=fedavg", "rounds=1"])) == ("done", 1)
    with pytest.raises(ConfigError, match="another configuration"):
        sweep_job([*TINY, "method=fedavg", "rounds=1", "train.lr=0.2"], folder)
    # And without a record either.
    (folder / ".hydra" / "overrides.yaml").unlink()
    with pytest.raises(ConfigError, match="not its configuration"):
        sweep_job([*TINY, "method=fedavg", "rounds=1"], folder)
    assert (folder / "result.json").read_bytes() == kept


def test_a_run_that_was_continued_with_another_k_is_no_job_of_the_sweep(tmp_path):
    folder, job = tmp_path / "one", [*TINY, "method=fedcross", "clients_per_round=2"]
    sweep_job([*job, "rounds=1"], folder)
    launch([*job, "rounds=2", f"resume={folder}", "clients_per_round=3"], folder)
    for rounds in (2, 3):
        with pytest.raises(ConfigError, match=r"continued with other settings than this job's \(clients_per_round\)"):
            sweep_job([*job, f"rounds={rounds}"], folder)


def test_jobs_with_the_same_settings_fail_once_in_each_sweep(monkeypatch, tmp_path, capsys):
    """FedBuff has no alpha, so two of the four jobs are one run."""
    ran = []

    def fails(overrides, folder):
        ran.append(folder)
        raise FederationError("nothing was trained")

    monkeypatch.setattr("fedcross.server.jobs.sweep_job", fails)
    sweep = ["-m", *TINY, "method=fedbuff,fedcross_async", "method.alpha=0.9,0.99", "hydra.sweep.dir=all"]
    for times in (1, 2):
        assert call(monkeypatch, tmp_path, *sweep) == 1
        assert (len(ran), len(set(ran))) == (3 * times, 3)
        assert capsys.readouterr().err.count("Same settings as a job that failed above, not run again") == 1


def test_a_job_that_runs_elsewhere_is_left_alone(tmp_path, capsys):
    with FileLock(tmp_path / ".lock"):
        sweep_job([*TINY, "rounds=1"], tmp_path)
    assert "Already running in another process" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_job_whose_server_is_on_keeps_its_files(monkeypatch, tmp_path, capsys):
    """The sweep's command was killed before the server's first checkpoint, and is typed again."""
    monkeypatch.setattr("fedcross.server.launch.SERVER_ENDS_S", 0.1)
    (tmp_path / "metrics.jsonl").write_text("of the server\n")
    with FileLock(tmp_path / SERVER_LOCK):
        sweep_job([*TINY, "rounds=1"], tmp_path)
    assert "Already running in another process" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "of the server\n"


def test_an_experiments_setting_by_data_set_reaches_the_job(monkeypatch, tmp_path):
    """FedProx's mu of the paper is looked up by the task's name inside the job."""
    small = ["task=digits", "model=mlp", "partition=iid", "method=fedprox", "seed=1"]
    sweep = ["experiment=fedcross/table2_cnn", *small, *TINY, "rounds=1", "hydra.sweep.dir=all"]
    assert call(monkeypatch, tmp_path, *sweep) == 0
    (run,) = load_runs([tmp_path / "all"]).runs
    assert run.settings["method.mu"] == 0.01


def wait_for(metrics: Path, lines: int, process: warm.Process) -> None:
    until = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text().count("\n") >= lines):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_ends_with_the_same_table(monkeypatch, tmp_path):
    sweep = ["-m", *TINY, "method=fedavg,fedcross", "seed=1", "rounds=40"]
    assert call(monkeypatch, tmp_path, *sweep, "hydra.sweep.dir=whole") == 0
    mark = fingerprint(load([*TINY, "method=fedcross"]))
    process = warm.Process(
        ["-m", "fedcross", *sweep, "hydra.sweep.dir=cut"],
        cwd=tmp_path,
        env=environment(tmp_path),
        start_new_session=True,
    )
    wait_for(tmp_path / "cut" / f"fedcross-digits-seed1-{mark}" / "metrics.jsonl", 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(results(tmp_path / "cut")) == 1
    assert call(monkeypatch, tmp_path, *sweep, "hydra.sweep.dir=cut") == 0
    assert table(tmp_path / "cut") == table(tmp_path / "whole")
    for name in results(tmp_path / "whole"):
        one, other = (tmp_path / where / name / "model.safetensors" for where in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_jobs_side_by_side_give_what_they_give_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr("fedcross.server.launch.STATE", None)
    monkeypatch.delenv("FEDCROSS_STATE")
    sweep = ["-m", *TINY, "method=scaffold,fedcross", "seed=1,2", "rounds=3"]
    assert call(monkeypatch, tmp_path, *sweep, "hydra.sweep.dir=alone") == 0
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=together"]
    own = {k: v for k, v in environment(tmp_path).items() if k != "FEDCROSS_STATE"} | {"OMP_NUM_THREADS": "1"}
    done = warm.run(["-m", "fedcross", *sweep, *parallel], cwd=tmp_path, env=own)
    assert done.returncode == 0, done.stderr
    assert len(results(tmp_path / "together")) == 4
    assert table(tmp_path / "together") == table(tmp_path / "alone")
    for name in results(tmp_path / "alone"):
        # SCAFFOLD's clients keep states: each run has its own.
        states = {path.suffix for path in (tmp_path / "together" / name / "clients").rglob("*")}
        assert (".npz" in states) == name.startswith("scaffold")
        one, other = (tmp_path / where / name / "model.safetensors" for where in ("alone", "together"))
        assert one.read_bytes() == other.read_bytes()


def test_rules_that_decide_which_replies_count_name_the_folder():
    plain = fingerprint(load(TINY))
    rules = ("min_replies=2", "enough_replies=2", "reassign=1", "hedge=1", "lead=2")
    assert len({plain, *(fingerprint(load([*TINY, f"federation.{rule}"])) for rule in rules)}) == 6
    assert fingerprint(load([*TINY, "federation.deadline_s=5", "federation.hedge=0"])) == plain
    checked_plan(["-m", "method=fedavg", "task=digits", "federation.enough_replies=1,2"])
    with pytest.raises(ConfigError, match="would share one folder"):
        checked_plan(["-m", "method=fedavg", "task=digits", "federation.deadline_s=5,6"])


def test_a_job_that_died_while_it_wrote_its_first_checkpoint_starts_again(tmp_path, monkeypatch):
    from fedcross.core.errors import StorageError
    from fedcross.server import checkpoint

    job, folder = [*TINY, "method=fedavg", "rounds=2", "seed=1"], tmp_path / "job"
    real = checkpoint.write_atomically

    def full(path, data):
        if path.name.startswith("round-"):
            path.with_name(f"{path.name}.part").write_bytes(data[:100])
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    with pytest.raises(StorageError, match="free disk space"):
        sweep_job(job, folder)
    monkeypatch.setattr(checkpoint, "write_atomically", real)
    sweep_job(job, folder)
    assert standing(folder, load(job)) == ("done", 2)
    assert not list((folder / "checkpoints").glob("*.part"))
