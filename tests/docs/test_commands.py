"""Every command that the pages print is understood; those that read a run read one."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from fedcross.conf.compose import CONF
from fedcross.server.command_line import SUBCOMMANDS, checked_plan
from fedcross.server.commands.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("fedcross", "make", "python")
TINY = ["rounds=2", "train.epochs=1", "task.limit=300", "task.limit_test=100", "logger=none", "engine.workers=1"]
#: Words that stand for something of the reader's.
OF_THE_READER = re.compile(
    r"\b(my_?\w*|mine|servermomentum|DIR|RES|NAME|TABLE|FILE|RUN|MULTIRUN|VALUE|data\.csv|own\w*|mynet|smooth|remote|folder=\S+|resume|clock\.events|task\.root)\b"
)


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for the lines of code blocks and the inline code that start with a program of ours."""
    found = {}
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        blocks = "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
        for line in [*blocks.splitlines(), *inline]:
            line = re.sub(r"^([A-Z_]+=\S+ +)+", "", line.strip())
            if line.split(" ")[0] in PROGRAMS and " " in line and "..." not in line:
                found[page.name, line] = None
    return list(found)


FOUND = commands()


def of(program: str) -> list[list[str]]:
    """Return the words of the commands of one program, without comments."""
    return [words for _, text in FOUND if (words := shlex.split(text, comments=True))[0] == program]


RUNS = [words[1:] for words in of("fedcross") if words[1] not in SUBCOMMANDS and not words[1].startswith("--")]
OTHERS = [words[1:] for words in of("fedcross") if words[1] in SUBCOMMANDS]


def test_the_pages_have_commands():
    assert {page for page, _ in FOUND} >= {"README.md", "sweeps.md", "papers.md", "deploy.md", "performance.md"}
    assert len(RUNS) > 40
    assert len(OTHERS) > 20


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_runs_and_sweeps_are_accepted(words, tmp_path, monkeypatch):
    if experiment := next((word for word in words if word.startswith("experiment=")), None):
        assert (CONF / "experiment" / f"{experiment.partition('=')[2]}.yaml").is_file()
        return  # tests/conf composes its jobs
    if OF_THE_READER.search(" ".join(words)):
        return
    monkeypatch.chdir(tmp_path)
    assert checked_plan(words).jobs


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_subcommands_know_their_options(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parts = words[:2] if words[0] == "deploy" or words[:2] == ["record", "verify"] else words[:1]
        sys.exit(main([*parts, "--help"]))
    assert not ended.value.code
    usage = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in usage] == []


@pytest.mark.parametrize("words", of("make"), ids=" ".join)
def test_make_has_the_target(words):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words[1:]) <= set(targets)


@pytest.mark.parametrize("words", of("python"), ids=" ".join)
def test_modules_exist(words):
    assert words[1] == "-m"
    assert importlib.util.find_spec(words[2]) is not None


@pytest.mark.slow
def test_the_readmes_steps_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "method=fedavg,fedcross", "task=digits", "seed=1", *TINY, "hydra.sweep.dir=runs"]) == 0
    assert len(list(tmp_path.rglob("result.json"))) == 2
    assert main(["report", "runs"]) == 0
    run = next(path.parent for path in tmp_path.rglob("result.json"))
    assert main(["export", str(run), "--out", "model.safetensors"]) == 0
