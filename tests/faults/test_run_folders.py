"""Edited run folders: a resume ends as the undisturbed run does, or it says why not and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from fedcross.core.files import SHARE
from fedcross.core.settings import quote
from fedcross.server.run_folder import LOCK, SERVER_LOCK
from tests.support.command import main, python
from tests.support.scale import size

SMALL = ["task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4", "clients_per_round=2"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1", "checkpoint.keep=3", "checkpoint.log=true"]
CUT, END = 4, 6
EDITS = size(12, 200)
WRITTEN = {".safetensors", ".jsonl", ".json", ".log", ".npz"}


def model(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def content(folder: Path) -> dict[str, str]:
    """Return every path below `folder` with what it is; the lock may change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = str(path.readlink()) if path.is_symlink() else "" if path.is_dir() else path.read_bytes().hex()
        found[str(path.relative_to(folder))] = kind
    for lock in (LOCK, SERVER_LOCK):
        found.pop(lock, None)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of three runs, cut off in the same round: ``own``, ``twin`` (equal settings), ``other``."""
    root = tmp_path_factory.mktemp("runs")
    for name, more in (("own", []), ("twin", []), ("other", ["seed=7"])):
        assert main([*SMALL, *more, f"rounds={CUT}", f"output={root / name}"]) == 0
    shutil.copytree(root / "own", root / "whole")
    assert main([f"resume={root / 'whole'}", f"rounds={END}"]) == 0
    return root


# ---- edits: each gets a random generator, a folder, one of its files, and the folder of all runs


def truncate(draw, folder, path, runs):
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(draw, folder, path, runs):
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(data))


def append(draw, folder, path, runs):
    path.write_bytes(path.read_bytes() + draw.choice([b"\xff\xfe", b"\n{}\n", b'{"round": 2}\n', b"\0" * 100]))


def remove(draw, folder, path, runs):
    path.unlink()


def foreign(draw, folder, path, runs):
    source = runs / draw.choice(["twin", "other"]) / path.relative_to(folder)
    target = path.with_name(draw.choice([path.name, path.name, "round-000007.safetensors"]))
    shutil.copy(source, target)


EDIT = (truncate, flip, append, remove, foreign)


@pytest.mark.slow
def test_a_resume_ends_as_the_undisturbed_run_or_changes_nothing(runs, tmp_path, capfd):
    whole, outcomes = model(runs / "whole"), {"equal": 0, "refused": 0}
    for number in range(EDITS):
        draw, folder = random.Random(number), tmp_path / f"run-{number}"
        shutil.copytree(runs / "own", folder)
        done = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            files = [
                path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (LOCK, SERVER_LOCK)
            ]
            inner = [path for path in files if path.parent.name == "checkpoints"]
            path, edit = draw.choice(draw.choice([files, inner or files])), draw.choice(EDIT)
            if path.stat().st_size and (edit is not foreign or (runs / "other" / path.relative_to(folder)).exists()):
                done.append(f"{edit.__name__} {path.relative_to(folder)!s}")
                edit(draw, folder, path, runs)
        before = content(folder)
        capfd.readouterr()
        code = main([f"resume={folder}", f"rounds={END}"])
        said = capfd.readouterr()
        if code == 0:
            assert model(folder) == whole, (number, done)
            outcomes["equal"] += 1
        else:
            assert "Traceback" not in said.err, (number, done, said.err)
            assert said.err.strip(), (number, done)
            assert content(folder) == before, (number, done, said.err)
            outcomes["refused"] += 1
        shutil.rmtree(folder)
    print(f"{EDITS} edited run folders: {outcomes}")
    assert outcomes["equal"] > EDITS / 4
    assert outcomes["refused"] > 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_elsewhere_from_copied_files(runs, tmp_path):
    """Another root, another working folder, another home, another umask, the old folder gone: the same bytes."""
    machine = tmp_path / "elsewhere" / "räume und mehr" / "run"
    machine.parent.mkdir(parents=True)
    first = tmp_path / "first" / "run"
    code = (
        "import os, sys; from fedcross.server.session import Session; real = Session._checkpoint\n"
        f"def killed(self, number):\n    real(self, number)\n    if number == {CUT - 1}: os.kill(os.getpid(), 9)\n"
        "Session._checkpoint = killed\n"
        "from fedcross.server.commands.main import main; sys.exit(main(sys.argv[1:]))"
    )
    home = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    died = python(
        *["-c", code, *SMALL, f"rounds={END}", f"output={first}"], env={**home, "HOME": str(tmp_path)}, cwd=tmp_path
    )
    assert died.returncode == -9, died.stderr[-2000:]
    shutil.copytree(first, machine)
    shutil.rmtree(first.parent)
    (tmp_path / "home").mkdir()
    resumed = python(
        *["-m", "fedcross", f"resume={quote(str(machine.relative_to(tmp_path / 'elsewhere')))}"],
        env={**home, "HOME": str(tmp_path / "home")}, cwd=tmp_path / "elsewhere", umask=0o027,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert model(machine) == model(runs / "whole")
    assert [json.loads(line)["round"] for line in (machine / "metrics.jsonl").read_text().splitlines()] == [
        *range(1, END + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, "group"])
def test_only_the_owner_reads_what_a_run_writes(tmp_path, monkeypatch, share):
    monkeypatch.setenv(SHARE, share or "")
    before = os.umask(0o002)
    try:
        more = ["snapshots.rounds=[1]", "method=scaffold"]
        assert main([*SMALL, *more, "rounds=1", f"output={tmp_path / 'run'}"]) == 0
    finally:
        os.umask(before)
    files = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*") if path.suffix in WRITTEN}
    folders = {path.parent: path.parent.stat().st_mode & 0o777 for path in files}
    assert {path.parent.name.split("-")[0] for path in files} >= {"run", "checkpoints", "snapshots"}
    assert set(files.values()) <= ({0o640, 0o600} if share else {0o600})
    assert {mode & 0o027 for mode in folders.values()} == {0}
    assert share or {mode & 0o077 for mode in folders.values()} == {0}
