"""``fedcross new-method``: the three files run, pass their test, and nothing is overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedcross.core.paths import import_root
from fedcross.server.commands.method_template import files
from tests.support import warm
from tests.support.command import subcommand
from tests.support.disk import largest_file

main = subcommand("new-method")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_files_run_and_pass_their_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], digits_cache: Path
) -> None:
    assert main(["my_way2", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    for path in files("my_way2"):
        assert str(tmp_path / "mine" / path) in said
    # The variable is set already, as after the printed export line; the test adds the same folder.
    environment = {
        **os.environ, "PYTHONPATH": str(import_root()), "FEDCROSS_CACHE": str(digits_cache),
        "FEDCROSS_PATH": str(tmp_path / "mine"),
    }  # fmt: skip
    test = tmp_path / "mine" / "tests" / "test_my_way2.py"
    done = warm.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
    run = ["-m", "fedcross", "method=my_way2", "task=digits", "task.limit=100", "rounds=1",
           "partition=iid", "engine.workers=1", "logger=none", "output=out"]  # fmt: skip
    done = warm.run(run, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"velocity"' in (tmp_path / "out" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-way", "a name has small letters, digits and single _"),
        ("2fast", "a name has small letters"),
        ("my__way", "a name has small letters"),
        ("", "a name has small letters"),
        ("class", "a name has small letters"),
        ("../x", "a name has small letters"),
        ("fedavg", "this name is taken, "),
        ("round", "this name is taken, "),
        ("fedcross_propellers", "this name is taken, "),
        ("objective", "this name is taken, fedcross uses it"),
        ("single_model", "this name is taken, fedcross uses it"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "conf" / "method" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert main(["mine", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    (tmp_path / "file").write_text("")
    assert main(["other", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_disk_that_was_full_is_not_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with largest_file(300):
        assert main(["mine", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert main(["mine", str(tmp_path)]) == 0


def test_the_guide_shows_these_files() -> None:
    guide = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    for path, text in files("fedmine").items():
        assert text.strip() in guide, path
