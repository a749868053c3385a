"""fedcross from Python: the same runs as on the command line, as objects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import fedcross
from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.paths import import_root

SMALL = ["task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4", "clients_per_round=2"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedcross.Run:
    folder = tmp_path_factory.mktemp("api") / "one"
    return fedcross.run(*SMALL, "method=fedcross", "rounds=3", "evaluate_every=2", f"output={folder}")


def test_a_run_has_metrics_result_model_and_folder(run):
    assert run.metrics["round"].tolist() == [1, 2, 3]
    assert np.isnan(run.metrics["test_accuracy"][0])
    assert run.metrics["test_accuracy"][2] == run.result["final_accuracy"]
    assert run.metrics["rejected"].tolist() == [{}, {}, {}]
    assert set(run.metrics) >= {"round", "test_accuracy", "bytes_up", "seconds"}
    assert (run.folder / "model.safetensors").exists()


def test_the_model_is_the_one_that_was_evaluated(run):
    from fedcross.conf.schema import load

    task = load([*SMALL, "method=fedcross"]).load_data().task
    with torch.no_grad():
        right = run.model(task.prepare(task.test.x)).argmax(1) == torch.from_numpy(task.test.y)
    assert float(right.float().mean()) == pytest.approx(run.result["final_accuracy"])
    assert not run.model.training


def test_an_earlier_run_is_opened_and_continued(run, tmp_path):
    again = fedcross.load(str(run.folder))
    assert again.result == run.result
    longer = fedcross.run(f"resume={run.folder}", "rounds=4")
    assert longer.metrics["round"].tolist() == [1, 2, 3, 4]
    with pytest.raises(StorageError, match="Name the folder of a run"):
        fedcross.load(tmp_path)


@pytest.mark.slow
def test_a_sweep_returns_its_runs_in_order_and_continues(tmp_path):
    several = [*SMALL, "method=fedavg,fedcross", "method.alpha=0.9", "rounds=1", f"hydra.sweep.dir={tmp_path}"]
    runs = fedcross.sweep(*several)
    assert [run.result["method"] for run in runs] == ["fedavg", "fedcross"]
    assert runs.metrics.groupby("method.name")["round"].size().to_dict() == {"fedavg": 1, "fedcross": 1}
    times = [(run.folder / "result.json").stat().st_mtime_ns for run in runs]
    assert [(run.folder / "result.json").stat().st_mtime_ns for run in fedcross.sweep(*several)] == times


def test_what_is_no_setting_is_refused():
    for wrong, words in (("--rounds=5", "no dashes"), (5, "a setting is text")):
        with pytest.raises(ConfigError, match=words):
            fedcross.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"FedCross: alhpa: unknown setting. Did you mean 'alpha'"):
        fedcross.FedCross(alhpa=0.9)


@pytest.mark.slow
def test_wrong_settings_raise_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"method\.alpha"):
        fedcross.run("method=fedcross", "method.alpha=7", f"output={tmp_path / 'x'}")
    with pytest.raises(ConfigError, match=r"fedcross\.sweep"):
        fedcross.run("experiment=demo")
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_the_methods_and_the_four():
    others = {"__init__", "classic", "flower", "method", "objective", "registry"}
    files = {path.stem for path in (import_root() / "strategies").glob("*.py")} - others
    methods = {name.replace("_", "") for name in files}
    names = {name for name in dir(fedcross) if name.lower() in methods}
    assert {name.lower() for name in names} == methods
    apps = {"server_app", "client_app"}
    assert set(fedcross.__all__) == {"run", "sweep", "load", "Run", "ClassicFedCross", "tell_partition"} | apps
    for name in {*fedcross.__all__, *names} - apps:
        assert getattr(fedcross, name).__name__ == name
    assert isinstance(fedcross.client_app, ClientApp)
    assert isinstance(fedcross.server_app, ServerApp)
    with pytest.raises(AttributeError, match="no attribute 'FedCros'"):
        fedcross.FedCros  # noqa: B018 - the attribute is what is tested


def test_importing_it_costs_nothing():
    code = "import fedcross, sys; print(sorted({'torch', 'flwr', 'hydra', 'numpy', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_an_interrupt_ends_cleanly_and_leaves_no_process(tmp_path):
    folder = tmp_path / "run"
    settings = [o for o in SMALL if not o.startswith("engine")] + [
        "engine.workers=2",
        "rounds=100000",
        f"output={folder}",
    ]
    code = f"import fedcross\ntry:\n    fedcross.run(*{settings!r})\nexcept KeyboardInterrupt:\n    print('ended')\n"
    command = [sys.executable, "-c", code]
    own_session = {"start_new_session": True, "cwd": tmp_path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **own_session) as process:
        assert process.stdout is not None
        for line in process.stdout:  # progress shows: lines, for this is no terminal
            if "round 2/" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().splitlines()[-1] == "ended"
        assert process.wait() == 0
    left = (
        [p for p in Path("/proc").glob("[0-9]*") if _session(p) == process.pid] if Path("/proc/self").exists() else []
    )
    assert left == []
    assert fedcross.load(folder).metrics["round"][0] == 1


def _session(process: Path) -> int:
    try:
        return os.getsid(int(process.name))
    except (ProcessLookupError, PermissionError):
        return -1
