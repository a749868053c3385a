"""One run per folder: locks, used folders, recorded settings and paths."""

import json

import pytest
from filelock import FileLock

import fedcross
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.server import run_paths
from fedcross.server.launch import launch
from fedcross.server.run_folder import (
    LOCK,
    FolderInUseError,
    claimed,
    folder_of,
    prepare,
    progress_of,
    refuse_used,
    saved_overrides,
    start_again,
    unused,
    writing,
    written,
)

SMALL = ["task=digits", "task.limit=120", "partition=iid", "partition.clients=4", "clients_per_round=2", "rounds=1"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    return fedcross.run(*SMALL, f"output={folder}").folder


def test_a_second_run_in_a_folder_in_use_is_told_so_before_the_data_are_read(tmp_path, capsys):
    with FileLock(tmp_path / LOCK), pytest.raises(FolderInUseError, match="another run works in this folder"):
        launch([*SMALL, f"output={tmp_path}"], tmp_path)
    assert "Reading" not in capsys.readouterr().out
    with written(tmp_path), pytest.raises(FolderInUseError, match="another run works"), written(tmp_path, wait_s=0.1):
        pass


def test_a_lock_ends_with_its_block(tmp_path):
    for _ in range(2):
        with claimed(tmp_path / "new"):
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


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


def test_nothing_is_written_for_a_run_that_cannot_start(tmp_path):
    for wrong in ("task.limit=1", f"data_root={tmp_path}/none", "clients_per_round=9"):
        task = ["task=cifar10"] if "data_root" in wrong else []
        with pytest.raises((ConfigError, DataError)):
            launch([*[o for o in SMALL if not o.startswith("task") or not task], *task, wrong], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_default_folder_gets_a_number(finished):
    assert unused(finished) == finished.with_name("one-2")
    assert folder_of(load(["output=x"])).name == "x"
    assert folder_of(load([])).name.endswith("fedcross-digits")


def test_settings_are_recorded_and_come_back(finished, tmp_path):
    assert saved_overrides(finished) == SMALL
    assert (finished / ".hydra" / "config.yaml").exists()
    with pytest.raises(StorageError, match="holds no run"):
        saved_overrides(tmp_path)
    (tmp_path / ".hydra").mkdir()
    for text in ("{", "3", "\xff"):
        (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
        with pytest.raises(StorageError, match="cannot be read"):
            saved_overrides(tmp_path)


def test_how_a_run_is_started_again(tmp_path):
    assert "another folder" in start_again(tmp_path / "run")
    (tmp_path / "multirun.yaml").touch()
    assert "start the sweep again" in start_again(tmp_path / "run")


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        prepare(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match="free disk space"), writing(tmp_path):
        raise OSError(28, "No space left on device")


# ---- paths ------------------------------------------------------------------------------------------------------


def test_paths_are_recorded_as_absolute_ones_and_come_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCROSS_DATA", raising=False)
    given = ["task=mnist", "task.root=sub", "data_root=data"]
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    run_paths.write(tmp_path / "run", run_paths.paths_of(load(given), given))
    found = run_paths.with_paths(tmp_path / "run", given[:2])
    assert found == ["task=mnist", f"data_root='{tmp_path}/data'", f"task.root='{tmp_path}/sub'"]
    assert run_paths.with_paths(tmp_path / "run", ["task=mnist"], ["task.root=x", "data_root=y"]) == ["task=mnist"]
    monkeypatch.setenv("FEDCROSS_DATA", "/elsewhere")
    assert not any("data_root" in one for one in run_paths.with_paths(tmp_path / "run", given[:2]))
    (tmp_path / "run" / run_paths.FILE).write_text("[")
    with pytest.raises(StorageError, match="cannot be read"):
        run_paths.with_paths(tmp_path / "run", [])


def test_a_moved_run_says_how_to_name_its_data(tmp_path):
    config = load(["task=cifar10", f"data_root={tmp_path}/gone"])
    assert "data_root=DIR" in str(run_paths.moved_data(config, DataError("no file")))


def test_a_replay_needs_enough_visits(tmp_path):
    visit = '{{"visit": {0}, "slot": 0, "client": 0, "start": {0}.0, "finish": {0}.5, "accepted": true}}\n'
    (tmp_path / "v.jsonl").write_text("".join(visit.format(number) for number in range(4)))
    replay = ["method=fedasync", "clock=replay", f"clock.events={tmp_path}/v.jsonl", "clients_per_round=2"]
    run_paths.check_events(load([*replay, "rounds=2"]))
    with pytest.raises(ConfigError, match="4 visits"):
        run_paths.check_events(load([*replay, "rounds=3"]))


def test_a_copied_run_is_resumed_elsewhere_to_the_bit(finished, tmp_path):
    import shutil

    shutil.copytree(finished, tmp_path / "copy")
    whole = fedcross.run(*SMALL, "rounds=2", f"output={tmp_path / 'whole'}").folder
    copy = fedcross.run(f"resume={tmp_path / 'copy'}", "rounds=2").folder
    assert (whole / "model.safetensors").read_bytes() == (copy / "model.safetensors").read_bytes()
    assert json.loads((copy / "result.json").read_text())["rounds"] == 2
