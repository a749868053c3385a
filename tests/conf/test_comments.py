"""What the comment at the head of an experiment's file tells a user to type runs with that experiment."""

import re
from itertools import groupby

import pytest

from fedcross.conf.compose import CONF
from fedcross.conf.schema import load
from fedcross.server.command_line import read_plan

ROOT = CONF / "experiment"
NAMES = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("[!_]*.yaml"))
WORDS = re.compile(r"'\+\+[^']*'|\S+")
SETTING = re.compile(r"(\+\+)?[a-z][a-z_]*(\.[a-z_]+)*=.+")
#: Letters of the papers' tables, and where a run is put.
NOT_SETTINGS = ("alpha=", "beta=", "hydra.")


def advice(name: str, comment: str) -> list[tuple[str, list[str]]]:
    """Return what `comment` names beside experiment `name`, or beside the one that its line names.

    Settings that stand side by side are one list.
    """
    found: list[tuple[str, list[str]]] = []
    for line in comment.splitlines():
        words = [word.strip("'").rstrip(".,;:") for word in WORDS.findall(line)]
        for typed, group in groupby(words, lambda word: bool(SETTING.fullmatch(word))):
            settings = [word for word in group if typed and not word.startswith(NOT_SETTINGS)]
            chosen = [word.removeprefix("experiment=") for word in settings if word.startswith("experiment=")]
            if rest := [word for word in settings if not word.startswith("experiment=")]:
                found.append(((*chosen, name)[0], rest))
    return found


def comment_of(name: str) -> str:
    head = (ROOT / f"{name}.yaml").read_text().partition("\ndefaults:")[0]
    return "\n".join(line.removeprefix("#") for line in head.splitlines()[2:])


ALL = [pair for name in NAMES for pair in advice(name, comment_of(name))]


def test_what_counts_as_advice():
    text = "Published, beta=.1 and N_e=1; on a CPU: model=lenet5 rounds=3.\n method=a '++method.swa={lr: 1, x: 2}' more"
    assert advice("one", text) == [
        ("one", ["model=lenet5", "rounds=3"]),
        ("one", ["method=a", "++method.swa={lr: 1, x: 2}"]),
    ]
    assert advice("one", "fedcross experiment=two rounds=4\nexperiment=three alone") == [("two", ["rounds=4"])]


def test_the_comments_hold_advice():
    assert {name for name, _ in ALL} > {"fedct/order", "fedct/order_lenet5", "family/pools", "fedcross/table2_cnn"}


def words(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), ALL, ids=words)
def test_what_a_comment_says_to_type_runs(name, settings):
    jobs = read_plan([f"experiment={name}", "seed=1", *settings]).jobs
    assert [load(jobs[i]) for i in {0, len(jobs) - 1}]


#: Their first lines name a package, an address, or a run's record, that a reader has to put in.
TO_BE_FILLED = ("engine/remote", "model/own", "method/flwr", "clock/replay")
CHOICES = sorted(
    f"{path.parent.name}/{path.stem}" for path in CONF.glob("*/[!_]*.yaml") if path.parent.name != "experiment"
)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice not in TO_BE_FILLED])
def test_a_choice_and_its_first_line_run(choice):
    line = (CONF / f"{choice}.yaml").read_text().splitlines()[0]
    text = re.sub(r" '(?=\w)", " '++", line.removeprefix("#"))
    group, alone = choice.partition("/")[0], choice.replace("/", "=")
    lines = [settings for _, settings in advice("none", text)]
    if not any(alone in settings for settings in lines):
        lines.append([alone])  # the line names another choice
    for settings in lines:
        own = [] if any(one.startswith(f"{group}=") for one in settings) else [alone]
        assert load(read_plan([*own, *settings]).jobs[0])
