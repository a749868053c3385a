from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedcross.core.errors import FederationError
from fedcross.engines import flower
from fedcross.engines.processes import Family


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCROSS_PATH", os.pathsep.join(["mine", str(tmp_path / "x"), ""]))
    monkeypatch.setenv("FEDCROSS_DATA", "data")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    result = flower.environment(tmp_path / "home", {"EXTRA": "1"})
    assert result["FEDCROSS_PATH"] == f"{tmp_path}/mine{os.pathsep}{tmp_path}/x"
    assert result["FEDCROSS_DATA"] == f"{tmp_path}/data"
    assert result["FLWR_HOME"] == str(tmp_path / "home")
    assert result["FLWR_TELEMETRY_ENABLED"] == "0"
    assert result["FLWR_DISABLE_UPDATE_CHECK"] == result["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert result["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert result["EXTRA"] == "1"


def test_commands_beside_this_python_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flower.executable("flwr") == str(Path(sys.executable).parent / "flwr")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FederationError, match=r"flower-none: not found.*Install"):
        flower.executable("flower-none")


def test_waiting_for_a_superlink_that_ended_shows_its_log(tmp_path: Path) -> None:
    with Family(tmp_path, dict(os.environ)) as family:
        family.start("superlink", [sys.executable, "-c", "raise SystemExit('port is taken')"])
        with pytest.raises(FederationError, match=r"superlink ended before the run began(?s:.*)port is taken"):
            flower.wait_for_superlink(family, flower.free_ports(1)[0])


def test_scratch_is_private_and_goes(tmp_path: Path) -> None:
    with flower.scratch(tmp_path / "work") as folder:
        assert folder.parent == tmp_path / "work"
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "key").touch()
    assert list((tmp_path / "work").iterdir()) == []
