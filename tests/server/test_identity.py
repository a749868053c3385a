"""Data are part of a run's identity: where a run goes on others are refused, and the same may lie elsewhere."""

import json
import shutil
from pathlib import Path

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.check import checked_plan
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.identity import assigned, check_data, fingerprint
from fedcross.server.jobs import _digests, sweep_job
from fedcross.server.launch import launch, quote
from fedcross.tasks.data import forget

TABLE = [
    "method=fedavg", "task=table", "task.file=p.csv", "task.label=ill", "partition=natural", "task.users=h",
    "clients_per_round=3", "train.epochs=1", "engine.workers=1", "logger=none",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the tables of two data sets, ``a`` and ``b``, and that of the first once more, ``moved``."""
    forget()
    _digests.clear()
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        rows = [f"{i % 7},{(i + number) % 5},h{i % 3},{i % 2}" for i in range(30)]
        (tmp_path / name / "p.csv").write_text("x,y,h,ill\n" + "\n".join(rows) + "\n")
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    return tmp_path


def data_of(folder: Path) -> object:
    return json.loads((folder / "result.json").read_text())["data"]


def on(root: Path, *more: str) -> list[str]:
    return [*TABLE, f"task.root={quote(str(root))}", *more]


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_data_alone(place: Path) -> None:
    folder = place / "run"
    launch(on(place / "a", "rounds=3", "stop_at=1"), folder)
    kept = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    resume = f"resume={quote(str(folder))}"
    with pytest.raises(ConfigError, match=r"training examples have SHA-256 .*those of the run in that folder") as told:
        launch(on(place / "b", "rounds=3", resume), folder)
    assert len(told.value.faults) == 2
    assert "task.root=" in told.value.faults[1]
    assert {path: path.read_bytes() for path in kept} == kept
    launch(on(place / "moved", "rounds=2", resume), folder)
    shutil.copy(place / "b" / "p.csv", place / "moved" / "p.csv")
    forget()
    with pytest.raises(ConfigError, match="Resume needs the same data"):
        launch(on(place / "moved", "rounds=3", resume), folder)
    identity = Checkpoints(folder).identity()
    assert identity is not None
    assert identity["data"] == data_of(folder)
    assert set(identity["data"]) == {"train", "test"}


@pytest.mark.slow
def test_a_sweep_skips_no_run_of_other_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "job"
    sweep_job(on(place / "a", "rounds=1"), folder)
    with pytest.raises(ConfigError, match="on other data is here") as told:
        sweep_job(on(place / "b", "rounds=1"), folder)
    assert "Choose another hydra.sweep.dir" in told.value.faults[1]
    with pytest.raises(ConfigError, match="Resume needs the same data"):
        sweep_job(on(place / "b", "rounds=2"), folder)
    assert "Already finished" not in capsys.readouterr().err
    sweep_job(on(place / "moved", "rounds=1"), folder)
    shutil.rmtree(place / "moved")
    _digests.clear()
    sweep_job(on(place / "moved", "rounds=1"), folder)  # what is finished needs no data
    assert capsys.readouterr().err.count("Already finished") == 2


@pytest.mark.parametrize("name", ["task.root", "data_root"])
def test_a_sweep_over_data_sets_is_refused_before_it_starts(name: str) -> None:
    """Their runs would share one folder; the name of a folder does not depend on where the data lie."""
    with pytest.raises(ConfigError, match=rf"{name}=ta,tb: runs that differ only in .* its own hydra\.sweep\.dir"):
        checked_plan(["-m", *TABLE, f"{name}=ta,tb"])
    checked_plan(["-m", *TABLE, f"{name}=ta", "seed=1,2"])
    assert fingerprint(load(on(Path("ta")))) == fingerprint(load(on(Path("tb"))))


def test_only_what_both_have_is_compared() -> None:
    """A run of an older version has no digests; a server may have its test examples alone."""
    check_data(None, {"train": "a"})
    check_data({}, {"train": "a"})
    check_data({"train": "a", "test": "b"}, {"test": "b"})
    with pytest.raises(ConfigError, match="test examples have SHA-256 c"):
        check_data({"train": "a", "test": "b"}, {"test": "c"})


def test_the_file_that_assigns_examples_counts_too(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    config = load(["task=digits", "partition=indices", f"partition.file={quote(str(file))}", "clients_per_round=2"])
    assert assigned(config) == {}
    file.write_text("[[0], [1]]")
    before = assigned(config)
    file.write_text("[[1], [0]]")
    with pytest.raises(ConfigError, match=r"indices of partition\.file have SHA-256"):
        check_data(before, assigned(config))
    assert assigned(load(["task=digits"])) == {}
