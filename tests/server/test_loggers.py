"""Optional viewers: what they are told, that a resume continues them, and what is said where one is missing."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.loggers import open_logger

ENTRY = {"round": 3, "test_accuracy": 0.5, "test_loss": None, "clients": 10, "rejected": {}}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_names_its_extra(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    settings = load([f"logger={name}"]).logger.model_dump()
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{name}\]'"):
        open_logger(settings, tmp_path, 1)


def test_an_unknown_logger_is_a_fault(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        open_logger({"name": "wand"}, tmp_path, 1)


def test_wandb_gets_every_number_under_its_round(monkeypatch, tmp_path):
    told: dict[str, Any] = {"log": []}
    run = SimpleNamespace(
        log=lambda values, step: told["log"].append((step, values)), finish=lambda: told.update(finished=True)
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **named: told.update(named) or run))
    settings = load(["logger=wandb", "logger.project=mine"]).logger.model_dump()
    logger = open_logger(settings, tmp_path, 1, "abc", {"train.lr": 0.1})
    logger.add(ENTRY)
    logger.close()
    assert told["log"] == [(3, {"test_accuracy": 0.5, "clients": 10.0})]
    assert (told["project"], told["mode"], told["id"], told["resume"]) == ("mine", "offline", "abc", "allow")
    assert (told["dir"], told["config"], told["finished"]) == (str(tmp_path), {"train.lr": 0.1}, True)


class Client:
    """What MlflowClient offers of that which is used."""

    log: list[tuple[object, ...]] = []  # noqa: RUF012 - shared by design: the library keeps runs outside the client

    def __init__(self, uri: str) -> None:
        self.log.append(("open", uri))

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        self.log.append(("experiment", name))
        return "7"

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> object:
        self.log.append(("run", experiment, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_param(self, run: str, key: str, value: object) -> None:
        self.log.append(("param", run, key, value))

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        self.log.append(("metric", run, key, value, step))

    def set_terminated(self, run: str) -> None:
        self.log.append(("end", run))


def test_mlflow_gets_every_number_and_continues_its_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Client, "log", [])
    settings = load(["logger=mlflow"]).logger.model_dump()
    for number in (3, 4):
        logger = open_logger(settings, tmp_path, number, "abc", {"train.lr": 0.1})
        logger.add(ENTRY | {"round": number})
        logger.close()
    uri = (tmp_path / "mlruns").as_uri()
    assert Client.log == [
        ("open", uri),
        ("experiment", "fedcross"),
        ("run", "7", {"fedcross.run": "abc"}),
        ("param", "r1", "train.lr", 0.1),
        ("metric", "r1", "test_accuracy", 0.5, 3),
        ("metric", "r1", "clients", 10.0, 3),
        ("end", "r1"),
        ("open", uri),
        ("metric", "r1", "test_accuracy", 0.5, 4),
        ("metric", "r1", "clients", 10.0, 4),
        ("end", "r1"),
    ]
