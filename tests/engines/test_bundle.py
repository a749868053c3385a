from __future__ import annotations

import ast
import io
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import FAB_MAX_SIZE

from fedcross.core.errors import FederationError
from fedcross.core.paths import APP_ROOMS, ROOMS, import_root, room
from fedcross.engines import bundle

# Flower names pathspec's patterns by their old name.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

ROOT = import_root()


def contents(app: Path) -> set[str]:
    """Return the names of the files in the Flower app bundle built from `app`."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        return set(archive.namelist())


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A checkout in which things lie around that must not travel."""
    root = tmp_path / "house"
    for package in ("fedcross", *ROOMS):
        (root / package / "__pycache__").mkdir(parents=True)
        (root / package / "__init__.py").write_text('"""Package."""\n')
        (root / package / "__pycache__" / "__init__.cpython-311.pyc").touch()
    for component in ("server", "client"):
        (root / component / "app.py").write_text("app = None\n")
    (root / "conf" / "method").mkdir()
    (root / "conf" / "method" / "fedcross.yaml").write_text("name: fedcross\n")
    (root / "conf" / "config.yaml").write_text("seed: 1\n")
    for stray in (".venv/lib/x.py", "outputs/a/metrics.jsonl", "multirun/b/x.yaml", "data/people.json", "state/x.json"):
        (root / stray).parent.mkdir(parents=True, exist_ok=True)
        (root / stray).write_text("{}\n")
    for stray in ("notes.json", "deploy/pi-1.key", "deploy/ca.pem", "tests/test_x.py", "tests/helper.py"):
        (root / stray).parent.mkdir(parents=True, exist_ok=True)
        (root / stray).write_text("secret\n")
    for name in ("pyproject.toml", ".gitignore", "LICENSE"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    return root


#: The files of the house above that travel, below its root; where they lie in a bundle is another matter.
ROOM_FILES = {f"{package}/__init__.py" for package in APP_ROOMS} | {
    "server/app.py",
    "client/app.py",
    "conf/config.yaml",
    "conf/method/fedcross.yaml",
}
REST = {"fedcross/__init__.py", "pyproject.toml", ".info/CONTENT"}


def test_bundle_is_laid_out_as_a_wheel_and_holds_nothing_else(house: Path, tmp_path: Path) -> None:
    app = bundle.make(tmp_path / "app", house)
    assert contents(app) == {f"fedcross/{name}" for name in ROOM_FILES} | REST


def test_flwr_run_from_a_checkout_takes_nothing_else_along(house: Path) -> None:
    assert contents(house) == ROOM_FILES | REST | {"LICENSE"}


def test_bundle_names_the_same_apps_as_the_checkout(house: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    app = tomllib.loads((bundle.make(tmp_path / "app", house) / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    ours = project["tool"]["flwr"]["app"]
    assert app == {**{key: ours[key] for key in ("publisher", "components")}, "config": {"overrides": ""}}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
    assert wheel == {name: f"fedcross/{name}" for name in ROOMS}


def test_a_missing_package_is_named(house: Path, tmp_path: Path) -> None:
    (house / "conf" / "__init__.py").unlink()
    with pytest.raises(FederationError, match=r"conf: this part of fedcross is missing"):
        bundle.make(tmp_path / "app", house)


def test_our_own_bundle_is_far_from_flowers_limit(tmp_path: Path) -> None:
    assert len(build_fab_from_disk(bundle.make(tmp_path / "app"))) < FAB_MAX_SIZE / 4


def test_what_stays_at_home_is_used_by_commands_alone() -> None:
    """No module of an app may import, even inside a function, a package that did not travel."""
    home = {f"fedcross.{name}" for name in ROOMS if name not in APP_ROOMS}
    commands = room("server") / "commands"
    for path in (path for name in APP_ROOMS for path in room(name).rglob("*.py") if commands not in path.parents):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "fedcross":
                used = {f"fedcross.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {node.module or ""}
            else:
                used = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            assert not {".".join(name.split(".")[:2]) for name in used} & home, f"{path}:{getattr(node, 'lineno', 0)}"


#: Loads an app as Flower's ClientApp process does, then says whose code it is, and where a trainer would find its own.
WHOSE = """
import sys
from flwr.supercore.object_ref import load_app
load_app("fedcross:client_app", ValueError, project_dir=sys.argv[1])
import fedcross, fedcross.client.cache
print(fedcross.__file__, fedcross.client.cache.__file__, sep="\\n")
"""


@pytest.mark.slow
def test_a_device_runs_the_code_that_came_with_the_run_not_the_installed_one(tmp_path: Path) -> None:
    app = bundle.make(tmp_path / "app")
    done = subprocess.run([sys.executable, "-c", WHOSE, str(app)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(Path(file).is_relative_to(app) for file in done.stdout.split())
