"""A run remembers where its data lie, and says how to name another place; its settings name none."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedcross
from fedcross.core.causes import cause_of
from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.server import places
from fedcross.server.checkpoint import Checkpoints
from tests.support.disk import largest_file

SMALL = (
    "method=fedavg", "task=table", "task.file=fields.csv", "task.label=kind", "partition=iid", "partition.clients=2",
    "clients_per_round=2", "rounds=1", "train.epochs=1", "engine.workers=1", "logger=none", "device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was started in the folder of its data, and named it by relative paths."""
    home = tmp_path_factory.mktemp("home")
    (home / "fields.csv").write_text("a,b,kind\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("FEDCROSS_CACHE", str(home / "cache"))
        patch.delenv("FEDCROSS_DATA", raising=False)
        yield fedcross.run(*SMALL, "data_root=.", "output=run")


@pytest.mark.slow
def test_it_goes_on_from_another_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    later = fedcross.run(f"resume={run.folder}", "rounds=2")
    assert list(later.metrics["round"]) == [1, 2]
    assert sum(weights.numel() for weights in fedcross.load(run.folder).model.state_dict().values()) > 0
    assert "data_root" not in (run.folder / ".hydra" / "overrides.yaml").read_text()


@pytest.mark.slow
def test_a_missing_folder_of_data_is_named_with_the_setting(run, tmp_path, monkeypatch):
    data = run.folder.parent
    moved = tmp_path / "moved"
    data_file = data / "fields.csv"
    moved.mkdir()
    (moved / "fields.csv").write_bytes(data_file.read_bytes())
    places.write(run.folder, {"data_root": str(tmp_path / "gone")})
    monkeypatch.delenv("FEDCROSS_DATA", raising=False)
    with pytest.raises(DataError, match=r"gone: the folder of this run's data is missing here.*data_root=DIR"):
        fedcross.run(f"resume={run.folder}", "rounds=3")
    assert list(fedcross.run(f"resume={run.folder}", "rounds=3", f"data_root={moved}").metrics["round"]) == [1, 2, 3]
    monkeypatch.setenv("FEDCROSS_DATA", str(moved))
    places.write(run.folder, {"data_root": str(tmp_path / "gone")})
    assert list(fedcross.run(f"resume={run.folder}", "rounds=4").metrics["round"])[-1] == 4


def config(**groups):
    usual = {
        "data_root": "data",
        "task": SimpleNamespace(),
        "engine": SimpleNamespace(),
        "partition": SimpleNamespace(),
    }
    return SimpleNamespace(**{**usual, "clock": SimpleNamespace(events=None), **groups})


def test_relative_places_are_recorded_as_absolute_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCROSS_DATA", raising=False)
    remote = config(engine=SimpleNamespace(authority=Path("keys/ca.crt")))
    (tmp_path / ".hydra").mkdir()
    places.write(tmp_path, places.of(remote, ["engine.authority=keys/ca.crt"]))
    monkeypatch.chdir("/")
    saved = ["engine=remote", "engine.authority=keys/ca.crt", "seed=2"]
    assert places.added(tmp_path, saved) == [
        "engine=remote", "seed=2", f"data_root='{tmp_path}/data'", f"engine.authority='{tmp_path}/keys/ca.crt'",
    ]  # fmt: skip
    assert "engine.authority=new.crt" not in places.added(tmp_path, saved, ["engine.authority=new.crt"])[1:]
    assert f"engine.authority='{tmp_path}/keys/ca.crt'" not in places.added(tmp_path, saved, ["engine=local"])


def test_the_tasks_folder_is_recorded_where_one_machine_reads_it():
    task = SimpleNamespace(root=Path("/data/mine"))
    assert places.of(config(task=task), ["task.root=/data/mine"])["task.root"] == "/data/mine"
    assert "task.root" not in places.of(config(task=task), [])
    remote = config(task=task, engine=SimpleNamespace(authority=Path("/ca.crt")))
    assert places.of(remote, ["task.root=/data/mine"]).keys() == {"data_root", "engine.authority"}


def test_a_run_of_an_older_version_has_none_and_a_damaged_record_is_named(tmp_path):
    assert places.added(tmp_path, ["seed=1"]) == ["seed=1"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / places.FILE).write_text("{")
    with pytest.raises(StorageError, match=r"places.json: cannot be read"):
        places.added(tmp_path, ["seed=1"])


def test_a_full_disk_is_told_with_its_cause(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places, "write_atomically", full)
    with pytest.raises(StorageError, match="Choose another folder") as told:
        places.write(tmp_path, {"data_root": "x"})
    assert cause_of(str(told.value)).name == "disk_full"
    assert told.value.exit_code == 2


def test_a_full_disk_leaves_the_places_of_the_run_that_goes_on(tmp_path):
    (tmp_path / ".hydra").mkdir()
    places.write(tmp_path, {"data_root": "/data/of/this/run"})
    with largest_file(16), pytest.raises(StorageError, match="cannot be written"):
        places.write(tmp_path, {"data_root": "/data/of/another/run"})
    assert places.added(tmp_path, []) == ["data_root='/data/of/this/run'"]


def test_a_record_that_has_moved_or_is_too_short_is_told_with_the_cure(tmp_path):
    """A run that is resumed has named it itself; what is left of a run that stops early needs fewer visits."""
    events = tmp_path / "visits.jsonl"
    replay = {"clock": SimpleNamespace(events=str(events)), "rounds": 2, "stop_at": None, "clients_per_round": 2}
    with pytest.raises(StorageError, match=r"Name a run's\.$"):
        places.check_record(config(**replay, resume=None))
    with pytest.raises(StorageError, match=r"If it was moved, add clock\.events=FILE \(the same file\)\.$"):
        places.check_record(config(**replay, resume="run"))
    line = '{{"visit": {0}, "slot": 0, "client": 0, "start": {0}.0, "finish": {0}.5, "accepted": true}}\n'
    events.write_text("".join(line.format(visit) for visit in range(3)))
    with pytest.raises(ConfigError, match=r"3 visits are in it, and 2 rounds with clients_per_round=2 make 4\."):
        places.check_record(config(**replay, resume=None))
    places.check_record(config(**{**replay, "stop_at": 1}, resume=None))
    places.check_record(config(**{**replay, "clients_per_round": 1}, resume=None))


def test_a_record_of_other_slots_or_clients_is_told_before_anything_is_written(tmp_path):
    events = tmp_path / "visits.jsonl"
    line = '{{"visit": {0}, "slot": {0}, "client": {1}, "start": 0.0, "finish": {0}.5, "accepted": true}}\n'
    events.write_text("".join(line.format(visit, 7 - visit) for visit in range(3)) + "\n")
    run = {"clock": SimpleNamespace(events=str(events)), "rounds": 1, "stop_at": None, "resume": None}
    places.check_record(config(**run, clients_per_round=3, partition=SimpleNamespace(clients=8)))
    with pytest.raises(ConfigError, match=r"slot 2 is in it, and clients_per_round=2\."):
        places.check_record(config(**run, clients_per_round=2, partition=SimpleNamespace(clients=8)))
    with pytest.raises(ConfigError, match=r"client 7 is in it, and partition\.clients=7\."):
        places.check_record(config(**run, clients_per_round=3, partition=SimpleNamespace(clients=7)))


#: Visits of unequal devices, in two rounds.
VISITS = (
    "method=fedbuff", "task=digits", "task.limit=90", "model.hidden=[4]", "partition=iid", "partition.clients=3",
    "clients_per_round=2", "rounds=2", "train.epochs=1", "engine.workers=1", "logger=none", "device=cpu",
    "devices=uniform",
)  # fmt: skip


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """A replay of a run that it named by a relative path, stopped after its first round."""
    home = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        fedcross.run(*VISITS, "output=first")
        fedcross.run(*VISITS, "clock=replay", "clock.events=first/visits.jsonl", "stop_at=1", "output=again")
    return home


@pytest.mark.slow
def test_a_replay_goes_on_from_another_folder_and_after_its_record_has_moved(replay, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "visits.jsonl" not in str(Checkpoints(replay / "again").identity())
    for name in ("same", "moved"):
        shutil.copytree(replay / "again", tmp_path / name)
    fedcross.run("resume=same", "stop_at=null")
    shutil.copy2(replay / "first" / "visits.jsonl", tmp_path / "visits.jsonl")
    fedcross.run("resume=moved", "stop_at=null", "clock.events=visits.jsonl")
    models = [(place / "model.safetensors").read_bytes() for place in (replay / "first", Path("same"), Path("moved"))]
    assert models == [models[0]] * 3


@pytest.mark.slow
def test_a_replay_of_another_record_or_of_none_does_not_go_on(replay, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(replay / "again", tmp_path / "run")
    other = tmp_path / "other.jsonl"
    other.write_text((replay / "first" / "visits.jsonl").read_text().replace("staleness", "late"))
    with pytest.raises(ConfigError, match=r"clock\.events: the run in that folder has 'SHA-256"):
        fedcross.run("resume=run", "stop_at=null", "clock.events=other.jsonl")
    with pytest.raises(ConfigError, match=r"clock\.events=gone\.jsonl: not a readable.*add clock\.events=FILE"):
        fedcross.run("resume=run", "stop_at=null", "clock.events=gone.jsonl")
