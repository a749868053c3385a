"""A run folder belongs to one run: nothing that a run has written is changed unless the run is continued."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedcross.conf.compose import run_folder
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.server import launch
from fedcross.server.app import ending
from fedcross.server.loggers import TensorBoard
from fedcross.server.run_folder import (
    LOCK,
    SERVER_LOCK,
    FolderInUseError,
    anew,
    claimed,
    folder_of,
    free,
    refuse_used,
    saved_overrides,
    used,
    written,
)
from fedcross.tasks.reading.params import read_lines
from tests.support.command import main
from tests.support.scale import size

LOCKS = (LOCK, SERVER_LOCK)
SMALL = ["task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4", "clients_per_round=2"]
SMALL += ["train.epochs=1", "logger=none", "engine.workers=1"]


def files(folder: Path) -> dict[str, str]:
    """Return the digest of every file but the locks."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in LOCKS)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "one"
    assert main([*SMALL, "method=fedavg", "rounds=2", f"output={folder}"]) == 0
    return folder


@pytest.mark.parametrize("how", ["output", "hydra.run.dir"])
def test_a_second_run_in_a_used_folder_is_refused_with_its_state_and_the_ways_on(finished, how, capsys):
    before = files(finished)
    code = main([*SMALL, "method=fedcross", "rounds=3", f"{how}={finished}"])
    told = capsys.readouterr().err
    assert code == 2
    assert "fedavg digits seed 1, finished, 2 rounds" in told
    assert f"resume={finished}" in told
    assert "another output=" in told
    assert files(finished) == before


def test_more_clients_a_round_than_the_data_have_are_refused_before_there_is_a_folder(tmp_path, capsys):
    x = np.zeros((20, 3), np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2, users=np.repeat(["north", "south"], 10))
    data = ["task=arrays", f"task.root={tmp_path}", "partition=natural", "clients_per_round=3"]
    assert main([*data, "method=fedavg", "logger=none", "engine.workers=1", f"output={tmp_path / 'run'}"]) == 2
    assert "clients_per_round=3: these data have 2 clients. Lower it." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_refused_resume_changes_nothing(finished, capsys):
    before = files(finished)
    assert main([f"resume={finished}", "train.lr=0.5", "rounds=4"]) == 2
    assert "train.lr" in capsys.readouterr().err
    assert files(finished) == before


@contextmanager
def held_by_another(how: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold one of the locks of `folder` inside the block."""
    code = (
        f"import sys; from pathlib import Path; from fedcross.server.run_folder import {how}\n"
        f"with {how}(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        if holder.poll() is None:
            holder.communicate()


def test_two_processes_cannot_have_one_folder(tmp_path):
    folder = tmp_path / "run"
    with (
        held_by_another("claimed", folder),
        pytest.raises(FolderInUseError, match="another process runs in this folder"),
        claimed(folder),
    ):
        pass
    with claimed(folder):  # whoever ends gives it back
        assert (folder / ".lock").exists()


def test_a_server_that_nobody_watches_keeps_its_folder(finished, monkeypatch, capsys):
    """The command that watched it was killed, so that only the server holds a lock."""
    monkeypatch.setattr(launch, "SERVER_ENDS_S", 0.1)
    before = files(finished)
    with held_by_another("written", finished):
        assert main([f"resume={finished}", "rounds=4"]) == 2
        assert "the server of a run writes here, whoever watches it" in capsys.readouterr().err
        assert files(finished) == before
        with pytest.raises(FolderInUseError, match="deploy stop RUN"), written(finished, wait_s=0.1):
            pass
    with written(finished, wait_s=0):
        pass


def test_a_server_that_is_ending_is_waited_for(tmp_path, capsys):
    with held_by_another("written", tmp_path) as before:
        assert before.stdin is not None
        Timer(0.2, before.stdin.close).start()
        with written(tmp_path):
            assert before.wait(60) == 0
    assert "another server writes here. Waiting for its end, 90 s at most." in capsys.readouterr().err


def test_no_lock_lies_among_keys(tmp_path):
    (tmp_path / "ca.key").touch()
    with pytest.raises(ConfigError, match="Choose another output="), written(tmp_path):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["ca.key"]


@pytest.mark.parametrize("where", ["barley", "2026-11-22/12-00-00", "2026-11-22/12-00-00/0"])
def test_a_folder_of_runs_is_no_runs_folder(finished: Path, tmp_path: Path, where: str, capsys) -> None:
    """Its files would lie between the other runs' folders."""
    refuse_used(tmp_path)
    place = tmp_path / where
    (place / ".hydra").mkdir(parents=True)
    (place / "notes").mkdir()
    (tmp_path / "link").symlink_to(finished)
    refuse_used(tmp_path)  # a project's own folders
    (place / ".hydra" / "overrides.yaml").write_text("[]")
    refuse_used(tmp_path)
    (place / ".lock").touch()
    with pytest.raises(ConfigError, match=rf"holds a run in {where}, .* Choose another output=, for example .*/NAME"):
        refuse_used(tmp_path)
    refuse_used(tmp_path / "new")


def test_a_run_without_a_checkpoint_is_not_to_be_continued(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"0 rounds\)\. It cannot be continued.*another output=, or delete") as told:
        refuse_used(tmp_path)
    assert "resume" not in str(told.value)


def test_a_run_that_no_command_started_has_a_folder_named_as_the_command_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(["method=fedavg", "task=digits"])
    assert re.fullmatch(r"\d\d-\d\d-\d\d-fedavg-digits", folder_of(config).name)
    assert re.fullmatch(r"\d\d-\d\d-\d\d-fedavg-digits", run_folder(["method=fedavg", "task=digits"]).name)
    assert folder_of(load(["output=a"])) == tmp_path / "a"


@pytest.mark.parametrize("name", ["plain", "my dir", "it's $5 [1]"])
def test_advice_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    """From a shell through Hydra's grammar."""
    folder = tmp_path / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    (folder / "checkpoints" / "round-1.safetensors").touch()
    with pytest.raises(ConfigError) as told:
        refuse_used(folder)
    advised = [
        str(told.value).partition("Continue it with ")[2].partition(", or choose")[0],
        ending({}, folder).partition("fedcross ")[2].partition(" stop_at")[0],
    ]
    for advice in advised:
        (setting,) = shlex.split(advice)
        (parsed,) = OverridesParser.create().parse_overrides([setting])
        assert (parsed.key_or_group, parsed.value()) == ("resume", str(folder))
    (folder / "checkpoints" / "round-1.safetensors").unlink()
    (tmp_path / "multirun.yaml").touch()
    assert shlex.split(anew(folder))[:2] == ["remove", str(folder)]


def test_a_run_that_is_past_stop_at_does_not_say_that_it_stopped_there(tmp_path: Path) -> None:
    assert ending({}, tmp_path, 5, 3).startswith(
        "Nothing was trained: the run has 5 rounds, more than stop_at=3. To go on"
    )
    for begun, stop_at in ((0, 3), (2, 3), (3, 3), (0, None)):
        assert ending({}, tmp_path, begun, stop_at).startswith("Stopped at the round of stop_at. To go on: ")


def test_the_parent_of_a_run_is_refused_before_anything_is_written(finished: Path, capsys) -> None:
    before = files(finished.parent)
    assert main([*SMALL, "method=fedavg", "rounds=2", f"output={finished.parent}"]) == 2
    assert "Cause: folder_used" in capsys.readouterr().err
    assert files(finished.parent) == before


@pytest.mark.parametrize("share", ["", "group"])
def test_lock_and_board_are_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    """Other packages make these files, with the modes of the umask; also those of a run of before."""
    monkeypatch.setenv("FEDCROSS_SHARE", share)
    umask = os.umask(0o002)
    try:
        with claimed(tmp_path):
            pass
        board = TensorBoard(tmp_path, 1)
        board.close()
        events = next(tmp_path.glob("events.out.tfevents.*"))
        assert {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / ".lock", events)} == {0o640 if share else 0o600}
        (tmp_path / ".lock").chmod(0o664)
        with claimed(tmp_path):
            assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == (0o640 if share else 0o600)
    finally:
        os.umask(umask)


def test_an_unfinished_run_says_how_far_it_came(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    with pytest.raises(ConfigError, match="not finished, 2 rounds"):
        refuse_used(tmp_path)


def test_folders_named_by_the_second_get_a_number(tmp_path):
    assert free(tmp_path / "a") == tmp_path / "a"
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("{}")
    assert free(tmp_path / "a") == tmp_path / "a-3"
    assert not used(tmp_path / "a-3")


def second(way: str, folder: Path, rounds: int, draw: random.Random) -> list[str]:
    """Return a second command on a run's folder; settings come from few, so that most are composed once."""
    return {
        "output": [f"output={folder}", *SMALL, "method=fedavg", "rounds=2"],
        "output other": [f"output={folder}", *SMALL, "method=scaffold", f"seed={draw.randint(2, 4)}", "rounds=1"],
        "hydra": [f"hydra.run.dir={folder}", *SMALL, "method=fedavg", "rounds=2"],
        "resume": [f"resume={folder}"],
        "resume longer": [f"resume={folder}", f"rounds={rounds + 1}"],
        "resume other": [f"resume={folder}", draw.choice(["seed=5", "train.batch=7", "method=fedcross", "rounds=0"])],
        "resume elsewhere": [f"resume={folder}", f"output={folder}-2"],
    }[way]


@pytest.mark.slow
def test_random_second_commands_leave_the_first_run_alone_unless_they_continue_it(finished, tmp_path):
    """Of 50, or 200, random pairs of (run, second command) the run's files change only when it is continued."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    draw = random.Random(7)
    often = {"output": 60, "output other": 40, "hydra": 20, "resume other": 40, "resume elsewhere": 20}
    share, counts = size(4, 1), {**often, "resume": 12, "resume longer": 8}
    ways = [way for way, count in counts.items() for _ in range(count // share)]
    draw.shuffle(ways)
    assert len(ways) == size(50, 200)
    for way in ways:
        before = files(folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        code = main(second(way, folder, len(lines), draw))
        after = files(folder)
        if way == "resume longer":
            assert code == 0
            assert (folder / "metrics.jsonl").read_text().splitlines()[:-1] == lines
            assert json.loads((folder / "result.json").read_text())["rounds"] == len(lines) + 1
        elif way == "resume":
            assert code == 0
            assert after["model.safetensors"] == before["model.safetensors"]
            assert after["metrics.jsonl"] == before["metrics.jsonl"]
        else:
            assert code == 2
            assert after == before
    assert not Path(f"{folder}-2").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x80", b"{}", b"- 1", b"a: [", b"", "- räume".encode("utf-16")])
def test_settings_that_cannot_be_read_are_one_line(tmp_path, content):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_bytes(content)
    with pytest.raises(StorageError, match=r"overrides\.yaml: .*This folder is not a run's folder\.$") as caught:
        saved_overrides(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_list_of_a_data_set_that_is_not_utf8_is_one_line(tmp_path):
    (tmp_path / "wnids.txt").write_bytes(b"n01443537\n\xe4\xff\n")
    with pytest.raises(DataError, match=r"wnids\.txt: not a readable UTF-8 text file"):
        read_lines(tmp_path / "wnids.txt")


@pytest.mark.parametrize("how", ["output", "hydra.run.dir"])
@pytest.mark.parametrize("name", ["server.key", "gateway.token", "token", "ca.crt"])
def test_a_folder_of_keys_gets_no_run(tmp_path: Path, how: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).touch()
    assert main([*SMALL, "method=fedavg", f"{how}={tmp_path}"]) == 2
    assert f"output={tmp_path}: a folder of keys, with {name}. Choose another output=." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("server/server.key", "a folder of folders of keys, with server/server.key"),  # a federation's, or a bundle
        ("page/token", "a folder of folders of keys, with page/token"),
        ("server.pem", "the gateway's folder, with server.pem"),
        ("superlink.db", "the SuperLink's folder, with superlink.db"),
        ("revoked-keys.json", "the SuperLink's folder, with revoked-keys.json"),
    ],
)
@pytest.mark.parametrize("how", ["output", "hydra.sweep.dir"])
def test_what_holds_keys_or_a_servers_files_gets_no_run(
    tmp_path: Path, how: str, name: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state" / name
    file.parent.mkdir(parents=True)
    file.touch()
    flags = ["-m", "seed=1,2"] if how == "hydra.sweep.dir" else []
    assert main([*flags, *SMALL, "method=fedavg", f"{how}={tmp_path / 'state'}"]) == 2
    assert f"{how}={tmp_path / 'state'}: {what}. Choose another {how}=." in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_run_among_keys_is_not_continued(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "server.key").touch()
    before = files(folder)
    assert main([f"resume={folder}", "rounds=9"]) == 2
    said = f"resume={folder}: a folder of keys, with server.key. Move the run to a folder of its own."
    assert said in capsys.readouterr().err
    assert files(folder) == before


def test_a_folder_beside_keys_may_hold_runs(tmp_path: Path) -> None:
    for name in ("keys/server/server.key", "keys/public/ca.crt", "bundle/state/shard.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for folder in (tmp_path, tmp_path / "bundle", tmp_path / "new"):
        refuse_used(folder)


def test_a_folder_with_the_name_of_a_token_is_none_of_keys(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    refuse_used(tmp_path)
