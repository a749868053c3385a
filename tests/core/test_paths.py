"""Modules of a user's own are found by this process and by those that it starts."""

import os
import sys

from fedcross.core.paths import own_object


def test_the_folder_of_an_own_module_comes_behind_the_users_python_path(tmp_path, monkeypatch):
    (tmp_path / "own_paths_module.py").write_text("value = 7\n")
    monkeypatch.setenv("FEDCROSS_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert own_object("own_paths_module:value", "x") == 7
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/of/the/user", str(tmp_path)]
