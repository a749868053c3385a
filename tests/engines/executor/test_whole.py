"""A bundle is unpacked whole or not at all, whoever else unpacks it or dies over it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from flwr.cli import install as flower

from fedcross.engines.executor import whole as module
from tests.support import flower_app

DIGEST = "ab" * 32


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return flower_app.write(tmp_path / "project", "faultapp", client="app = 1", server="app = 2")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def install(project: Path, home: Path) -> Path:
    original = getattr(flower.validate_and_install, "__wrapped__", flower.validate_and_install)
    return module.whole(original)(project, DIGEST, None, home, skip_prompt=True)


def test_it_lies_where_flower_would_put_it_and_the_user_reads_so(project, home, capsys) -> None:
    place = install(project, home)
    assert place.parent == home / "apps"
    assert files(place) == files(project)
    assert str(place) in capsys.readouterr().out.replace("\n", "")
    assert [path.name for path in home.iterdir()] == ["apps"]
    assert flower.validate_and_install(project, DIGEST, None, home, skip_prompt=True) == place


def test_what_is_there_is_taken_as_it_is(project, home) -> None:
    place = install(project, home)
    (place / "mark").write_text("")
    assert install(project, home) == place
    assert (place / "mark").exists()


def test_nobody_sees_half_of_it(project, home, monkeypatch) -> None:
    """While one process is in the middle of its copy, another one unpacks the bundle itself and both have all of it."""
    middle, go = threading.Event(), threading.Event()
    copy = shutil.copyfile

    def copying(source: Any, target: Any, **more: Any) -> Any:
        done = copy(source, target, **more)
        if threading.current_thread().name == "first":
            middle.set()
            assert go.wait(60)
        return done

    monkeypatch.setattr(flower.shutil, "copyfile", copying)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(install(project, home)), name="first")
    first.start()
    assert middle.wait(60)
    assert not [one for one in (home / "apps").iterdir() if not one.name.startswith((module.PREFIX, module.LOCK))]
    place = install(project, home)
    assert files(place) == files(project)
    go.set()
    first.join()
    assert found == [place]
    assert files(place) == files(project)
    assert [path.name for path in home.iterdir()] == ["apps"]


def test_a_copy_that_fails_is_no_app_for_the_next_run(project, home, monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(flower.shutil, "copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            install(project, home)
    assert not list((home / "apps").iterdir())
    assert files(install(project, home)) == files(project)


def test_a_place_that_cannot_be_taken_is_an_error(project, home, monkeypatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError):
        install(project, home)


def test_flowers_function_is_replaced_once(monkeypatch) -> None:
    before = getattr(flower.validate_and_install, "__wrapped__", flower.validate_and_install)
    monkeypatch.setattr(flower, "validate_and_install", before)
    module.attach()
    replaced = flower.validate_and_install
    assert replaced is not before
    module.attach()
    assert flower.validate_and_install is replaced


def test_half_an_app_is_taken_as_long_as_somebody_may_work_on_it_and_then_replaced(project, home) -> None:
    """Flower itself leaves one when it is killed, as did older versions of fedcross."""
    place = install(project, home)
    (place / "faultapp" / "server.py").unlink()
    assert install(project, home) == place
    assert files(place) < files(project)
    for path in (place, *place.rglob("*")):
        os.utime(path, (0, 0))
    assert install(project, home) == place
    assert files(place) == files(project)
    assert {path.name for path in (home / "apps").iterdir()} == {place.name, module.LOCK}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_many_processes_that_find_an_old_half_all_get_the_whole_app(project, home) -> None:
    place = install(project, home)
    for _ in range(5):
        for path in (place, *place.rglob("*")):
            if path.is_file():
                path.unlink()
        for path in (place, *place.rglob("*")):
            os.utime(path, (0, 0))
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_complete, args=(project, home)) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 6


def _complete(project: Path, home: Path) -> None:
    raise SystemExit(files(install(project, home)) != files(project))


def test_a_time_in_the_future_is_no_reason_to_wait_for_it(project, home) -> None:
    place = install(project, home)
    (place / "faultapp" / "server.py").unlink()
    for path in (place, *place.rglob("*")):
        os.utime(path, (4e9, 4e9))
    assert files(install(project, home)) == files(project)


def test_what_killed_processes_left_is_deleted_after_a_while(project, home) -> None:
    apps = home / "apps"
    old, new = apps / f"{module.PREFIX}old", apps / f"{module.PREFIX}new"
    for left in (old, new):
        left.mkdir(parents=True)
        (left / "file").write_text("")
    for path in (old, old / "file"):
        os.utime(path, (0, 0))
    install(project, home)
    assert (old.exists(), new.exists()) == (False, True)


def test_what_others_begin_after_the_clock_was_read_is_left_alone(project, home) -> None:
    new = home / "apps" / f"{module.PREFIX}new"
    new.mkdir(parents=True)
    earlier = new.stat().st_mtime - 5
    module._sweep(home / "apps", earlier)
    assert new.exists()
    assert module._touched(new, earlier) > earlier


def test_the_folder_of_apps_may_be_a_link_elsewhere(project, home, tmp_path) -> None:
    (tmp_path / "large disk").mkdir()
    home.mkdir()
    (home / "apps").symlink_to(tmp_path / "large disk")
    assert files(install(project, home)) == files(project)


def test_what_flower_said_before_an_error_is_shown(project, home, monkeypatch, capsys) -> None:
    def failing(*_: Any, **__: Any) -> Path:
        print("half way")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        module.whole(failing)(project, DIGEST, None, home, skip_prompt=True)
    assert "half way" in capsys.readouterr().out
