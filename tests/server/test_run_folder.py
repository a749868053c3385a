"""One run per folder: locks, used folders, recorded settings and paths."""

import json
import os

import pytest
from filelock import FileLock

import fedcross
from fedcross.conf.schema import RunConfig, load
from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.server.launch import check_events, launch, paths_of
from fedcross.server.run_folder import (
    LOCK,
    FolderInUseError,
    Lines,
    prepare,
    progress_of,
    refuse_used,
    saved_overrides,
    writing,
    written,
)

SMALL = ["task=digits", "task.limit=120", "partition=iid", "partition.clients=4", "clients_per_round=2", "rounds=1"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    os.environ.pop("FEDCROSS_DATA", None)
    folder = tmp_path_factory.mktemp("runs") / "one"
    return fedcross.run(*SMALL, f"output={folder}").folder


def test_a_second_run_in_a_folder_in_use_is_told_so_before_the_data_are_read(tmp_path, capsys):
    with FileLock(tmp_path / LOCK), pytest.raises(FolderInUseError, match="another run works in this folder"):
        launch([*SMALL, f"output={tmp_path}"], tmp_path)
    assert "Reading" not in capsys.readouterr().out
    with written(tmp_path), pytest.raises(FolderInUseError, match="another run works"), written(tmp_path, wait_s=0.1):
        pass


def test_a_used_folder_is_refused_with_its_progress(finished, tmp_path):
    with pytest.raises(ConfigError, match=r"fedcross digits seed 1, finished, 1 round.*resume="):
        refuse_used(finished)
    with pytest.raises(ConfigError, match="it holds the run one"):
        refuse_used(finished.parent)
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match="not finished, 2 rounds"):
        refuse_used(tmp_path)
    assert progress_of(tmp_path / "none") == "not finished, 0 rounds"
    refuse_used(tmp_path / "none")


def test_a_run_that_died_before_its_first_checkpoint_is_started_anew(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name, text in {
        "metrics.jsonl": "",
        "audit.jsonl": "{}\n",
        "checkpoints/round-000000.safetensors.part": "x",
    }.items():
        (tmp_path / name).write_text(text)
    refuse_used(tmp_path)
    (tmp_path / "checkpoints" / "round-000000.safetensors").write_text("x")
    with pytest.raises(ConfigError, match="resume="):
        refuse_used(tmp_path)


def test_nothing_is_written_for_a_run_that_cannot_start(tmp_path):
    for wrong in ("task.limit=1", f"data_root={tmp_path}/none", "clients_per_round=9"):
        task = ["task=cifar10"] if "data_root" in wrong else []
        with pytest.raises((ConfigError, DataError)):
            launch([*[o for o in SMALL if not o.startswith("task") or not task], *task, wrong], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_settings_are_recorded_and_come_back(finished, tmp_path):
    assert saved_overrides(finished)[:-1] == SMALL
    assert saved_overrides(finished)[-1].startswith("data_root='/")
    assert (finished / ".hydra" / "config.yaml").exists()
    with pytest.raises(StorageError, match="holds no run"):
        saved_overrides(tmp_path)
    (tmp_path / ".hydra").mkdir()
    for text in ("{", "3", "\xff"):
        (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
        with pytest.raises(StorageError, match="cannot be read"):
            saved_overrides(tmp_path)


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        prepare(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match="free disk space"), writing(tmp_path):
        raise OSError(28, "No space left on device")


# ---- paths ------------------------------------------------------------------------------------------------------


def test_paths_are_recorded_as_absolute_ones_and_come_back(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["task=mnist", "task.root=sub", "data_root=data"]
    assert paths_of(load(given), given) == {"data_root": f"{tmp_path}/data", "task.root": f"{tmp_path}/sub"}
    monkeypatch.setenv("FEDCROSS_DATA", "/elsewhere")
    assert saved_overrides(finished) == SMALL


def test_a_resumed_run_without_its_data_says_how_to_name_them(finished, tmp_path, monkeypatch):
    def gone(self):
        raise DataError("no file")

    monkeypatch.setattr(RunConfig, "load_data", gone)
    with pytest.raises(DataError, match="data_root=DIR"):
        launch([*SMALL, f"resume={finished}", f"data_root={tmp_path}/gone"], finished)


def test_a_replay_needs_enough_visits(tmp_path):
    visit = '{{"visit": {0}, "slot": 0, "client": 0, "start": {0}.0, "finish": {0}.5, "accepted": true}}\n'
    (tmp_path / "v.jsonl").write_text("".join(visit.format(number) for number in range(4)))
    replay = ["method=fedasync", "clock=replay", f"clock.events={tmp_path}/v.jsonl", "clients_per_round=2"]
    check_events(load([*replay, "rounds=2"]))
    with pytest.raises(ConfigError, match="4 visits"):
        check_events(load([*replay, "rounds=3"]))


@pytest.mark.slow
def test_a_copied_run_is_resumed_elsewhere_to_the_bit(finished, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "copy")
    whole = fedcross.run(*SMALL, "rounds=2", f"output={tmp_path / 'whole'}").folder
    copy = fedcross.run(f"resume={tmp_path / 'copy'}", "rounds=2").folder
    assert (whole / "model.safetensors").read_bytes() == (copy / "model.safetensors").read_bytes()
    assert json.loads((copy / "result.json").read_text())["rounds"] == 2


def test_a_line_that_a_crash_has_cut_off_does_not_count(tmp_path):
    (tmp_path / "lines").write_text("whole\ncut")
    assert Lines(tmp_path / "lines").read() == ["whole"]
