"""`fedcross --help` says what the settings are unless set, and names every subcommand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fedcross.conf import compose as composing
from fedcross.server.commands.main import SUBCOMMANDS

TEXT = yaml.safe_load((Path(composing.CONF) / "config.yaml").read_text())["hydra"]["help"]["template"]
#: Words of the help for values that YAML writes otherwise.
WORDS = {"all": None, "outputs/...": None, "false": False}


def settings() -> dict[str, str]:
    found = {}
    for names, values in re.findall(r"^(\S.*?) \[(.+?)\] ", TEXT, re.MULTILINE):
        first, *rest = names.split(", ")
        group = first.rpartition(".")[0]
        found |= dict(zip([first, *(f"{group}{one}" for one in rest)], values.split(", "), strict=True))
    return found


def test_the_defaults_in_the_help_are_the_defaults():
    assert len(settings()) >= 20
    for name, value in settings().items():
        node: Any = composing.compose(("data_root=data",))
        for part in name.split("."):
            node = node[part]
        assert node == WORDS.get(value, yaml.safe_load(value)), name


def test_the_help_names_every_subcommand_and_fits_two_screens():
    (line,) = re.findall(r"^fedcross SUBCOMMAND --help +(.+)$", TEXT, re.MULTILINE)
    assert set(line.split(", ")) == set(SUBCOMMANDS)
    assert TEXT.count("\n") < 60
