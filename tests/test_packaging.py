"""What a wheel, a source archive and a checkout install: one name, `fedcross`, that no other package can break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fedcross.core.paths import ROOMS, import_root

ROOT = import_root()
TINY = ["method=fedcross", "task=digits", "partition.clients=3", "clients_per_round=3", "rounds=2", "engine.workers=1"]
#: What lies beside a user's script and must not matter: a package with the name of one of our rooms, and a module.
DECOYS = {"server/__init__.py": "raise ImportError('own')\n", "tasks.py": "raise ImportError('own')\n"}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    built = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(built, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.mark.slow
def test_a_wheel_holds_one_top_level_name(archives: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(archives[0]).namelist()
    version = archives[0].name.split("-")[1]
    assert {name.split("/")[0] for name in names} == {"fedcross", f"fedcross-{version}.dist-info"}
    assert {name.split("/")[1] for name in names if name.startswith("fedcross/")} == {
        *ROOMS, "__init__.py", "__main__.py", "py.typed",
    }  # fmt: skip
    tracked = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {f"fedcross/{name}" for name in tracked.stdout.split()} == {
        name for name in names if name.startswith("fedcross/") and name.split("/")[1] in ROOMS
    }


@pytest.mark.slow
def test_a_source_archive_builds_the_same_wheel(archives: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(archives[1]) as archive:
        members = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    assert not [name for name in members if name.split("/")[1:2] == ["results"]]
    unpacked = next(tmp_path.iterdir())
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(built, cwd=unpacked, check=True, capture_output=True)
    again = zipfile.ZipFile(next((tmp_path / "again").glob("*.whl")))
    first = zipfile.ZipFile(archives[0])
    assert sorted(again.namelist()) == sorted(first.namelist())
    assert all(again.read(name) == first.read(name) for name in first.namelist())


def beside_decoys(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` in a folder that holds modules named like our rooms."""
    for name, text in DECOYS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["wheel", "checkout"])
def test_a_user_s_own_package_named_like_a_room_changes_nothing(
    place: str, archives: tuple[Path, Path], tmp_path: Path
) -> None:
    installed = ROOT
    if place == "wheel":
        installed = tmp_path / "site"
        zipfile.ZipFile(archives[0]).extractall(installed)
    code = (
        "from fedcross.strategies.fedcross import FedCross; import fedcross, sys\n"
        "print(fedcross.__file__, FedCross.__module__)\n"
    )
    if place == "wheel":
        code += f"sys.argv[1:] = {TINY!r}; from fedcross.server.commands.main import run; run()"
    here = tmp_path / "here"
    here.mkdir()
    done = beside_decoys(here, sys.executable, "-c", code, PYTHONPATH=os.pathsep.join([str(here), str(installed)]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"{installed / 'fedcross' / '__init__.py'} fedcross.strategies.fedcross"
    found = [json.loads(path.read_text())["method"] for path in here.rglob("result.json")]
    assert found == ["fedcross"] * (place == "wheel")
