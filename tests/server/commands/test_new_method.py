"""``fedcross new-method``: the files run and pass their tests, and nothing is overwritten."""

import os
import subprocess
import sys

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, StorageError
from fedcross.server.commands.new_method import write
from tests.support.command import subcommand


@pytest.mark.slow
def test_the_files_run_and_pass_their_tests(tmp_path, capsys, monkeypatch):
    assert subcommand("new-method")(["my_way2", str(tmp_path / "mine")]) == 0
    assert subcommand("new-method")(["my_loss", str(tmp_path / "mine"), "--loss"]) == 0
    assert "FEDCROSS_PATH=" in capsys.readouterr().out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "mine" / "tests")]
    environment = {name: value for name, value in os.environ.items() if name != "FEDCROSS_PATH"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
    monkeypatch.setenv("FEDCROSS_PATH", str(tmp_path / "mine"))
    assert load(["method=fedcross", "objective=my_loss"]).new_objective().__class__.__module__.endswith("my_loss")


@pytest.mark.parametrize("name", ["My", "1a", "a-b", "class", "fedavg", "objective", "a__b", ""])
def test_names_that_cannot_be(tmp_path, name):
    with pytest.raises(ConfigError):
        write(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    paths = write("mine", tmp_path)
    before = [path.read_bytes() for path in paths]
    paths[0].unlink()
    with pytest.raises(StorageError, match="exists already"):
        write("mine", tmp_path)
    assert [path.read_bytes() for path in paths[1:]] == before[1:]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        write("other", tmp_path / "file")
