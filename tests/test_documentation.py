"""Every command that README and docs print is found, understood, and run.

It is run in full where that is cheap, on a small run where it reads one, and else as far as the check that comes before
anything is started.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from flwr.common.config import parse_config_args

from fedcross.conf.compose import CONF
from fedcross.conf.schema import load, load_text
from fedcross.core.run_config import overrides_of
from fedcross.server.check import checked_plan
from fedcross.server.commands.main import SUBCOMMANDS
from fedcross.server.commands.run import SHOWING
from fedcross.server.commands.run import main as fedcross

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = ["rounds=2", "train.epochs=1", "task.limit=300", "task.limit_test=100", "logger=none", "snapshots.rounds=[2]"]


HOMES = {name: home for name, (home, _) in SUBCOMMANDS.items()}
OLD = {f"fedcross-{name}" for name in HOMES}  # scripts of version 0.1
PROGRAMS = {"fedcross", *OLD, "make", "flwr", "python", "docker"}


@dataclass(frozen=True)
class Command:
    """A command as a page prints it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        words = shlex.split(self.text, comments=True)
        while re.match(r"^[A-Z_]+=", words[0]):
            words.pop(0)
        if words[0] == "fedcross" and words[1] in HOMES:
            return [" ".join(words[:2]), *words[2:]]
        return words


def commands() -> list[Command]:
    """Return the lines of code blocks, and the code in table cells, that start with one of our programs."""
    found: dict[Command, None] = {}
    for page in PAGES:
        fenced = False
        lines = iter(page.read_text().splitlines())
        for line in lines:
            if line.startswith("```"):
                fenced = not fenced
                continue
            cells = re.findall(r"`([^`]+)`", line) if line.startswith("|") else []
            for text in [line] if fenced or line.startswith("    ") else cells:
                while text.rstrip().endswith("\\"):
                    text = text.rstrip()[:-1] + next(lines)
                text = text.strip()
                first = re.sub(r"^([A-Z_]+=\S+ +)+", "", text).split(" ")
                if first[0] in PROGRAMS and len(first) > 1:
                    found[Command(page.name, text)] = None
    return list(found)


FOUND = commands()


def of(*programs: str) -> list[Command]:
    return [c for c in FOUND if c.words[0] in programs]


def subcommand(name: str) -> ModuleType:
    """Return the module that runs ``fedcross NAME``."""
    return importlib.import_module(HOMES[name.removeprefix("fedcross ")])


def name(command: Command) -> str:
    return f"{command.page}: {command.text[:60]}"


def test_the_pages_have_commands():
    assert {c.page for c in FOUND} >= {
        "README.md",
        "sweeps.md",
        "partitions.md",
        "methods-fedcross.md",
        "performance.md",
    }
    assert {c.words[0] for c in FOUND} >= {"fedcross", "fedcross report", "fedcross export", "make", "flwr"}


def test_no_page_prints_a_script_that_is_not_installed():
    assert [(c.page, c.text) for c in FOUND if c.text.split(" ")[0] in OLD] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", of("fedcross"), ids=name)
def test_runs_and_sweeps_are_accepted(command, tmp_path, monkeypatch):
    # Of a printed sweep two jobs: tests/conf composes every job of every experiment.
    monkeypatch.setattr("fedcross.server.check.MOST_JOBS", 2)
    monkeypatch.setattr("fedcross.server.places.check_record", lambda config: None)  # RUN/visits.jsonl is the reader's
    words = [word.replace("DIR", str(tmp_path)) for word in command.words[1:] if word != "--cost"]
    if SHOWING & set(words):
        return
    if any(own in command.text for own in ("method=fedmine", "model=mynet")):
        return  # of the reader: tests/server/commands/test_new_method.py and tests/tasks/test_own_model.py run them
    if words[0].startswith("experiment=") and all(word.startswith("data_root=") for word in words[1:]):
        assert (CONF / "experiment" / f"{words[0].partition('=')[2]}.yaml").is_file()  # tests/conf composes its jobs
        return
    if any(word.startswith("resume=") for word in words):  # needs a run: tests/server/commands/test_run.py resumes one
        assert load([word for word in words if not word.startswith("resume=")])
        return
    plan = checked_plan(words)
    assert plan.multirun == ("-m" in words or ("experiment=" in command.text and "hydra.mode=RUN" not in command.text))
    assert plan.jobs


@pytest.mark.parametrize("command", of("flwr"), ids=name)
def test_what_flower_hands_over_is_accepted(command):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    given = parse_config_args([command.words[command.words.index("--run-config") + 1]])
    assert set(given) <= set(declared)
    assert load_text(overrides_of({**declared, **given}, nodes=2))


@pytest.mark.parametrize("command", of("make"), ids=name)
def test_make_has_the_target(command):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(command.words[1:]) <= set(targets)


@pytest.mark.parametrize("command", of("python"), ids=name)
def test_benchmarks_know_their_options(command, monkeypatch, capsys):
    assert command.words[1] == "-m"
    if not command.words[2].startswith("benchmarks."):
        assert importlib.util.find_spec(command.words[2]) is not None
        return
    module = importlib.import_module(command.words[2])
    if hasattr(module, "__path__"):  # a folder, which `python -m` starts at its main module
        module = importlib.import_module(f"{command.words[2]}.__main__")
    monkeypatch.setattr(sys, "argv", [command.words[2], "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    usage = capsys.readouterr().out
    assert [word for word in command.words[3:] if word.startswith("-") and word not in usage] == []


def test_compose_has_the_profiles_that_are_named():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    for command in of("docker"):
        assert command.words[1] in {"compose", "build"}
        named = [after for before, after in zip(command.words, command.words[1:]) if before == "--profile"]
        assert set(named) <= profiles


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The README's sweep for real, with two rounds: the folder of its four runs and one of FedCross's."""
    folder = tmp_path_factory.mktemp("sweep")
    printed = next(c for c in of("fedcross") if c.page == "README.md" and "task=digits" in c.text and "-m" in c.words)
    words = [*printed.words[1:], *TINY, "engine.workers=1", "log.audit=true", f"hydra.sweep.dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedcross", *words])
        assert fedcross(words) == 0
    runs = sorted(path.parent for path in folder.rglob("result.json"))
    return SimpleNamespace(folder=folder, runs=runs, one=next(r for r in runs if r.name.startswith("fedcross")))


@pytest.mark.slow
def test_the_readmes_sweep_makes_four_runs(sweep):
    results = [json.loads((run / "result.json").read_text()) for run in sweep.runs]
    assert sorted((r["method"], r["seed"]) for r in results) == [(m, s) for m in ("fedavg", "fedcross") for s in (1, 2)]


#: What stands on the pages for folders and files of the reader, and what takes its place here.
def filled(words: list[str], sweep: SimpleNamespace, folder: Path) -> list[str]:
    own = {
        "multirun/*": sweep.folder,
        "FOLDER/*": sweep.one,
        "KIND": "cka",
        "outputs/alpha": sweep.folder,
        "outputs/RUN": sweep.one,
        "RUN": sweep.one,
        "DIR": folder,
    }
    filled = [str(own.get(word, word)) for word in words]
    filled = ["2" if before == "--round" else word for before, word in zip(["", *filled], filled)]
    small = ["task=digits", "partition.clients=4"]
    return [new for word in filled for new in (small if word == "task=cifar10" else [word])]


READERS = [
    c
    for c in of(*(f"fedcross {name}" for name in HOMES if name not in ("doctor", "deploy")))
    # Run elsewhere: tests/docs/test_own_data.py, tests/server/test_verify.py, tests/strategies/test_fedcross_widths.py
    if "femnist" not in c.text
    and c.page != "own-data.md"
    and "--width" not in c.text
    and "record verify" not in c.text
    and "lora-sent140" not in c.text
]


@pytest.mark.slow
@pytest.mark.parametrize("command", READERS, ids=name)
def test_what_reads_a_run_reads_this_one(command, sweep, tmp_path, monkeypatch):
    words = filled(command.words[1:], sweep, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command.words[0], *words])
    main = subcommand(command.words[0]).main
    try:
        ended = main(words)
    except SystemExit as exit_:
        ended = exit_.code
    assert not ended


@pytest.mark.parametrize("command", of("fedcross deploy", "fedcross doctor"), ids=name)
def test_deployment_commands_are_understood(command):
    """Their arguments are those of the parser; tests/deploy and tests/server/commands/test_doctor.py run them."""
    assert subcommand(command.words[0])._parser().parse_args(command.words[1:])


def test_the_partition_of_real_users_is_accepted():
    """The one command that has no small stand-in: its files are real (mark ``data`` reads them)."""
    command = next(c for c in of("fedcross partition") if "femnist" in c.text)
    assert load([word for word in command.words[1:] if not word.startswith("-")])
