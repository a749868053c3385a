"""A configuration that all clients refuse ends the run."""

import os
from pathlib import Path

import pytest

from tests.support.command import python

PATIENCE_S = 1500
REFUSING = """
from fedcross.core.errors import ConfigError
from fedcross.strategies.objective import Objective
from fedcross.strategies.parts.single_model import SingleModel


class Refuses(Objective):
    def prepare(self, visit):
        raise ConfigError("this device has no such sensor. Leave the method out.")


class Refusing(SingleModel):
    Objective = Refuses
"""
SETTINGS = (
    *("method=refusing", "task=digits", "rounds=3", "partition.clients=2", "clients_per_round=2", "logger=none"),
    *("task.limit=100", "task.limit_test=50"),
)
ENGINES = [
    pytest.param("local", marks=pytest.mark.slow),
    pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    pytest.param("superlink", marks=[pytest.mark.superlink, pytest.mark.slow]),
]


def refusing(own: Path) -> str:
    """Write the method that clients refuse below `own`, and return the path for FEDCROSS_PATH."""
    for file, text in (("strategies/refusing.py", REFUSING), ("conf/method/refusing.yaml", "name: refusing\n")):
        (own / file).parent.mkdir(parents=True)
        (own / file).write_text(text)
    return str(own)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_all_clients_refuse_ends_the_run_with_their_words(tmp_path, engine):
    output = tmp_path / "run"
    own = {"local": ["engine.workers=1"], "ray": ["engine.cpus=1"]}.get(engine, [])  # one process for both clients
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "FEDCROSS_PATH": refusing(tmp_path / "own")}
    command = ["-m", "fedcross", *SETTINGS, f"engine={engine}", *own, f"output={output}"]
    done = python(*command, cwd=tmp_path, env={**os.environ, **paths}, timeout=PATIENCE_S)
    told = done.stdout + done.stderr
    assert done.returncode != 0, told[-3000:]
    assert "All 2 clients of round 1 refuse: this device has no such sensor. Leave the method out." in told
    assert "Traceback" not in done.stderr.splitlines()[-1]
    assert not (output / "metrics.jsonl").exists() or (output / "metrics.jsonl").read_text() == ""
