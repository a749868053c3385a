"""docs/data.md: a row for each task, and the program that makes the file of femnist_300."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedcross.conf.compose import CONF
from fedcross.tasks import femnist
from tests.support import small_files

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()


def test_every_task_has_a_row():
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE)))
    assert sorted(named) == sorted(path.stem for path in (CONF / "task").glob("*.yaml"))


def test_the_printed_program_makes_the_file_of_some_writers(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small_files.femnist(tmp_path)
    (program,) = re.findall(r"```python\n(.+?)```", PAGE.split("## femnist_300")[1], re.DOTALL)
    exec(compile(program, "data.md", "exec"), {})
    leaf, npz = (femnist.load(femnist.Params(root=tmp_path, source=source)) for source in ("leaf", "npz"))
    assert leaf.user_names == npz.user_names
    for part in ("train", "test"):
        first, second = getattr(leaf, part), getattr(npz, part)
        order = np.argsort(first.users, kind="stable")  # LEAF's files need not have the writers in order
        for name in ("x", "y", "users"):
            np.testing.assert_array_equal(getattr(first, name)[order], getattr(second, name))


def test_the_page_on_deployment_names_the_tasks_that_devices_refuse():
    own = (ROOT / "docs" / "deploy.md").read_text().split("\n## Own data\n")[1].split("\n## ")[0]
    refused = {path.stem for path in (ROOT / "tasks").glob("*.py") if "alone=False" in path.read_text()}
    assert refused == {*re.findall(r"`task=(\w+)`", re.findall(r"^.* are refused, because", own, re.MULTILINE)[0])}
